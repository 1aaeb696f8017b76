"""task=explore: samples and scores candidates for runs in other processes; docs/explorers.md."""

from pathlib import Path

from solrl_lightning.artifacts.run_folder import remove_unused
from solrl_lightning.build import build_model, build_rewards, device_of, facts_of, samplers_of
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Explore
from solrl_lightning.rewards.addresses import bound, check_server, read_token


def explore(cfg: Run) -> None:
    """Load the model and the rewards and answer requests until Ctrl-C or SIGTERM, which wait for those in work.

    Raises:
        UserError: see ``check_server``.
    """
    task = cfg.task_as(Explore)
    check_server("explore", task.host, task.port)
    from solrl_lightning.explorers.facts import PRECISION
    from solrl_lightning.explorers.server import Explorer, create_app  # fastapi and uvicorn are optional
    from solrl_lightning.rewards.server import Server

    with bound(task.host, task.port) as listener:
        device = device_of(cfg)
        module = build_model(cfg, device, samplers_of(cfg), build_rewards(cfg, device))
        precision = module.transformers.precision_backend
        facts = facts_of(cfg, module, module.transformers.samplers) | {PRECISION: precision}
        address = f"[{task.host}]" if ":" in task.host else task.host
        url = f"http://{address}:{listener.getsockname()[1]}"
        with module.scoring_worker() as submit:
            app = create_app(Explorer(module), submit, facts, read_token())
            Server(app, f"explores on {device}, {precision}: {url} (Ctrl-C ends)").run_until_signal(listener)
    remove_unused(Path(cfg.run_dir))
