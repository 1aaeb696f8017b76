"""task=serve: the chosen rewards as an HTTP server for ``reward=http``; docs/rewards/http.md has the format."""

from pathlib import Path

from solrl_lightning.artifacts.run_folder import remove_unused
from solrl_lightning.build import build_rewards, device_of, prepare_device
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Serve
from solrl_lightning.rewards.addresses import bound, check_served, read_token


def serve(cfg: Run) -> None:
    """Load the rewards and answer requests until Ctrl-C or SIGTERM, which wait for the requests in work.

    Raises:
        UserError: see ``check_served``.
    """
    task = cfg.task_as(Serve)
    check_served(cfg.reward.members, cfg.reward.combine, task.host, task.port)
    from solrl_lightning.rewards.server import Server, create_app  # fastapi and uvicorn are optional

    host = str(task.host)
    with bound(host, task.port) as listener:
        device = device_of(cfg.trainer)
        prepare_device(device)
        rewards = build_rewards(cfg.reward, cfg.model.frames, device)
        app = create_app(rewards, device, read_token(), task.max_images, task.max_pixels)
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{listener.getsockname()[1]}/score"
        Server(app, f"{rewards.name} on {device}: {url} (Ctrl-C ends)").run_until_signal(listener)
    remove_unused(Path(cfg.run_dir))
