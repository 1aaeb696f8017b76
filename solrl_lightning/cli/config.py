"""Composes a command line with Hydra and checks its names: groups, options and keys.

``checks`` has the rules for values; ``run_folder`` and ``resume`` look at folders and checkpoints.
"""

import itertools
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, reduce
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError

from solrl_lightning.artifacts.formatting import quoted, shell_quoted
from solrl_lightning.cli.console import first_lines
from solrl_lightning.errors import UserError, did_you_mean, nearest

CONFIG_MODULE = "solrl_lightning.conf"
EXPERIMENT = "experiment"
"""The group whose options set keys of any group."""
_HEADER = re.compile(r"^#\s*@package\s+_global_\s*$", re.MULTILINE)
_ONE_EACH = (
    "task model data family explorers objective scheduler precision trainer".split()
)  # a run has one option of each
_SEPARATORS = (",", "=")
_UNQUOTED = r"[\w/\-+.$%*@?|: ,]"  # characters of a value that Hydra reads without quotes, in ASCII
_IN_MAPPING = r""":([^"'{}\[\],]+)"""  # a value
_OF_THE_PROGRAM = re.compile(r"run_dir|task\.(reads|overrides)|callbacks\.summary\.hparams(\..*)?")  # facts of the run
_OF_COMMANDS = {  # keys that a file cannot set
    "run_dir": "the program sets that key. Leave it out; hydra.run.dir=<folder> is the folder of a run",
    "ckpt": "a run begins with it. Write ckpt=<file> on the command line",
}
_STRAIGHT = str.maketrans("\u201c\u201d\u201e\u00ab\u00bb\u2018\u2019\u201a", '"' * 5 + "'" * 3)  # typographic quotes
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
_REPEATS = re.compile(r"\$\{([\w.]+)\}")  # the value of a key that repeats another key
_HINTS = {
    "Cannot merge DictConfig with ListConfig": " It has a list in place of keys. Options of a group are chosen in the "
    "defaults list, as with `- override /reward: [shapes, pickscore]`.",
    "Could not delete '": ": its option is another one, or a file of your own chooses it. Choose one with "
    "<group>=<option>, as in logger=none.",
}
"""What is added to errors of Hydra with these words."""
_QUOTED_HOME = re.compile(r"""(?<=[=,\[{:(\s])(["'])~/""")


class _OwnOptions(SearchPathPlugin):
    """Adds the user's folders to the places where an opened `ConfigTree` finds options."""

    sources: ClassVar[tuple[str, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for source in self.sources:
            search_path.append("command-line", source)  # Hydra's name for what --config-dir adds


@lru_cache  # Hydra copies its sources at each call
def _options(loader: ConfigLoader, group: str) -> list[str]:
    return loader.get_group_options(group, ObjectType.CONFIG)


class ConfigTree:
    """The configuration tree of the package and of the folders of ``--config-dir`` and ``hydra.searchpath``.

    A context manager that restores Hydra's global state on exit.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        self.sweeps = False
        if find_spec(CONFIG_MODULE) is None:  # its folder is beside the package in a clone
            raise UserError("solrl_lightning is not installed: its configuration is missing. Run pip install -e .")
        if config_dir and not Path(config_dir).is_dir():
            raise UserError(f"--config-dir={config_dir} is invalid: {Path.cwd()} has no such folder. Correct it.")
        folders = [f"file://{Path(config_dir).resolve()}"] if config_dir else []
        _check_files(folders)  # an error must precede a change of Hydra's global state
        Plugins.instance().register(_OwnOptions)
        _OwnOptions.sources += tuple(folders)
        self._hydra = GlobalHydra.instance().hydra  # of a job
        GlobalHydra.instance().clear()
        self._context = initialize_config_module(CONFIG_MODULE, version_base="1.3")

    def __enter__(self) -> "ConfigTree":
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _OwnOptions.sources = ()
        self._context.__exit__(*error)
        GlobalHydra.instance().hydra = self._hydra

    @property
    def loader(self) -> ConfigLoader:
        return GlobalHydra.instance().config_loader()

    @property
    def own_sources(self) -> tuple[str, ...]:
        """The places of options other than the package."""
        return _OwnOptions.sources

    def look_in(self, sources: Iterable[str]) -> None:
        """Add places of options, written as in ``hydra.searchpath``: ``file://<folder>``.

        Raises:
            UserError: a file has the name of a packaged option, which Hydra would take.
        """
        sources = tuple(sources)
        _check_files(sources)
        _OwnOptions.sources += sources
        GlobalHydra.instance().clear()
        initialize_config_module(CONFIG_MODULE, version_base="1.3")

    def groups(self) -> list[str]:
        return [g for g in self.loader.get_group_options("", ObjectType.GROUP) if g != "hydra"]

    def options(self, group: str) -> list[str]:
        return _options(self.loader, group)

    def experiments(self) -> dict[str, str]:
        """Return the text of each file of experiments by the name of its option."""
        folders = [_packaged(), *_folders(self.own_sources)]
        experiments = [file for folder in folders for file in sorted(folder.glob(f"{EXPERIMENT}/[!.]*.yaml"))]
        return {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in experiments}

    def parse(self, arguments: Iterable[str]) -> list[Override]:
        """Return the overrides of a command line. UserError for an argument that is not an override."""
        parser = OverridesParser.create(config_loader=self.loader)
        arguments, overrides = list(arguments), []
        for index, argument in enumerate(arguments):
            try:
                overrides += parser.parse_overrides([argument])
            except OverrideParseException as error:
                reason = next((line for line in str(error).splitlines() if " while evaluating " in line), None)
                raise UserError(
                    f"Cannot read {argument!r}: {reason}." if reason else self._unreadable(arguments, index)
                ) from error
            if not overrides[-1].key_or_group:
                raise UserError(self._unreadable(arguments, index))
        return overrides

    def _unreadable(self, arguments: Sequence[str], index: int) -> str:
        argument = _whole(arguments, index)
        is_split = argument != arguments[index]
        straight = argument.translate(_STRAIGHT)
        inner = straight[1:].removesuffix(straight[0]) if straight[:1] in ("'", '"') else straight
        if straight != argument and self._reads(inner):
            bare = re.sub(r"""(["'])([\w./-]+)\1""", r"\2", inner)
            return f"Cannot read {argument!r}: its quotes are from a word processor. Write {shlex.quote(bare)}."
        if argument[:1] in ("'", '"'):  # as in a list of arguments of an editor, or in a variable of a shell
            return f"Cannot read {argument!r}: no shell has read its outer quotes. Write {inner}."
        if (flag := argument.lstrip(_DASHES)) != argument:
            dashes = "-" if len(flag) < 3 else "--"
            return f"Cannot read {argument!r}: its dashes are from a word processor. Write {dashes}{flag}."
        key, equals, value = argument.partition("=")
        if not equals:
            homes = [f"{group}={argument}" for group in self.groups() if argument in self.options(group)]
            fix = did_you_mean(homes) or " --help lists the common ones."
            return f"Cannot read {argument!r}: an option is written key=value.{fix}"
        if not argument.isprintable():
            return f"Cannot read {argument!r}: it has characters that cannot be printed. Leave them out."
        bare = re.sub(r"""(["'])([^"':,{}]+)\1\s*:\s*""", r"\2:", argument)
        if bare != argument and self._reads(bare):
            return f"Cannot read {argument!r}: keys of a mapping have no quotes here. Write {shlex.quote(bare)}."
        if not all(map(str.isascii, re.findall(r"""[{,]\s*["']?([^"':,{}]+)["']?\s*:""", value))):
            fix = "Write the mapping in a file of --config-dir."
            return f"Cannot read {argument!r}: keys of a mapping are words in ASCII here. {fix}"
        for opening, closing in ("[]", "{}"):
            if value.startswith(opening) and value.count(opening) != value.count(closing):
                return f"Cannot read {argument!r}: each {opening} needs a {closing}, or the whole text quotes."
        is_list = value.startswith("[") and value.endswith("]")
        texts = [text.strip().strip("'\"") for text in (value.strip("[]").split(",") if is_list else [value])]
        escapes = "'" if "${" in value else '\\"'  # OmegaConf reads what is within an interpolation once more
        quoted = ",".join('"{}"'.format(os.path.expanduser(text).replace('"', escapes)) for text in texts)
        with_quotes = f"{key}=[{quoted}]" if is_list else f"{key}={quoted}"
        if value.startswith("{") and self._reads(inside := f"{key}={self._quoted_within(value)}"):
            with_quotes = inside
            texts = [match[1] for match in re.finditer(_IN_MAPPING, value) if match[0] not in inside]
        if call := re.fullmatch(r"(\w+)\((.*)\)", value):  # glob, choice
            named = [part.rpartition("=") for part in call[2].split(",")]
            within = ",".join(f'{name}{equals}"{text}"' for name, equals, text in named)
            if self._reads(with_quotes_within := f"{key}={call[1]}({within})"):
                with_quotes = with_quotes_within
        if (without := re.sub(r"\s*([=,:\[\]{}])\s*", r"\1", argument).strip(",")) != argument and self._reads(without):
            reason = "the shell has split it at a space" if is_split else "it has a comma or space too many"
            return f"Cannot read {argument!r}: {reason}. Write {shlex.quote(without)}."
        if not self._reads(with_quotes):
            return f"Cannot read {argument!r}: its key must be names with dots between them, as in optimizer.lr=1e-4."
        characters = "".join(texts)
        strange = next((repr(one) for one in characters if not re.match(_UNQUOTED, one, re.ASCII)), "spaces")
        fix = shlex.quote(with_quotes)
        return f"Cannot read {argument!r}. A text with {strange} needs quotes that survive the shell: {fix}."

    def _quoted_within(self, mapping: str) -> str:
        """Return a mapping with quotes around its values that cannot be read without."""

        def quoted(match: re.Match[str]) -> str:
            text = match[1].strip()
            if self._reads(f"key={text}"):
                return match[0]
            return ":null" if text == "~" else ':"{}"'.format(os.path.expanduser(text).replace('"', '\\"'))

        return re.sub(_IN_MAPPING, quoted, mapping)

    def completed(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments with ``++`` before keys that have a default and are in no file of the chosen groups.

        ``~`` at the beginning of a path is the home folder.
        """
        arguments = list(map(_with_home, self.parse(arguments)))
        overrides = self.parse(arguments)
        dotted = [o for o in overrides if o.type == OverrideType.CHANGE and "." in o.key_or_group]
        if dotted:
            from solrl_lightning.options.run import Run  # pydantic takes 0.1 s

            parted = [(override, *override.key_or_group.rpartition(".")) for override in dotted]
            dotted = [override for override, parent, _, name in parted if name in Run.defaults(parent)]
        if not dotted:
            return list(arguments)
        trees = self.combinations(overrides)
        added = {
            override.input_line
            for override in dotted
            if any(override.key_or_group not in tree for tree in trees)
            and all(isinstance(tree.get(override.key_or_group.rpartition(".")[0]), dict) for tree in trees)
        }
        return [f"++{argument}" if argument in added else argument for argument in arguments]

    def combinations(self, overrides: Iterable[Override]) -> list[dict[str, Any]]:
        """Return the `nodes` of every combination of the options that ``overrides`` choose and the keys they add."""
        adding = [each for each in overrides if self.options(each.key_or_group) or adds(each)]
        choices = [self.forced(_swept(each, every=True)) for each in adding]
        return [self.nodes(combination) for combination in itertools.product(*choices)]

    def nodes(self, choices: Sequence[str]) -> dict[str, Any]:
        """Return the value of each node of the options ``choices`` by its dotted key."""
        return dict(_nodes(OmegaConf.to_container(self.compose(choices), resolve=False)))

    def forced(self, choices: Iterable[str]) -> list[str]:
        """Return ``choices`` with ``++`` before keys that they add, which are there without the overrides that delete
        them first."""
        keys = (o.is_add() and o.package is None and not self.options(o.key_or_group) for o in self.parse(choices))
        return [f"+{choice}" if is_key else choice for choice, is_key in zip(choices, keys, strict=True)]

    def _reads(self, argument: str) -> bool:
        try:
            (override,) = OverridesParser.create(config_loader=self.loader).parse_overrides([argument])
        except HydraException:
            return False
        return bool(override.key_or_group)

    def compose(self, arguments: Sequence[str]) -> DictConfig:
        """Return the whole configuration, with Hydra's own part.

        Raises:
            UserError: for an option or a key that does not exist, or a file that Hydra cannot read.
        """
        try:
            return compose("config", list(arguments), return_hydra_config=True)
        except (YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"A YAML file of your own is invalid: {first_lines(error)}. Correct it.") from error
        except (RecursionError, AssertionError) as error:
            rule, fix = "has an override before another entry", "Write overrides last"  # with a list of options
            if isinstance(error, RecursionError):
                rule = "includes itself"
                fix = "Name a file of the same group without its group, as in `defaults: [<option>, _self_]`"
            raise UserError(f"The defaults list of a YAML file of your own {rule}. {fix}.") from error
        except (HydraException, ValueError) as error:
            check_names(self, arguments)
            hints = "".join(hint for words, hint in _HINTS.items() if words in str(error))
            raise UserError(first_lines(error) + hints) from error

    def _broken_rule(self, override: Override) -> str:
        """Return what is wrong with an override, whatever the others are, and the fix; empty if nothing is."""
        key, value = override.key_or_group, override.value()
        options = value if isinstance(value, list) and self.options(key) else []
        if _OF_THE_PROGRAM.fullmatch(key) and not override.is_add():
            return _OF_COMMANDS["run_dir"]
        if key.startswith("hydra.sweeper.params"):
            fix = "Write it as an option, as in -m seed=1,2, or put it into an experiment's file"
            return f"Hydra reads what a sweep varies from options and files. {fix}"
        if any(options.count(option) > 1 for option in options):
            return "it names an option twice. Name each once"
        if key == "reward" and self.own_sources:  # Hydra would make one reward of two files with one key
            names = Counter(name for option in options for name in self.compose([f"reward=[{option}]"]).reward)
            common = self.compose(["reward=[]"]).reward
            for name in (name for name, count in names.items() if count > 1 and name not in common):
                fix = "Give the entry of your own file its own name"
                return f"two of their files have the key {name}, and would be one reward. {fix}"
        return ""

    def jobs(self, arguments: Sequence[str], multirun: bool) -> list[DictConfig]:
        """Return the configuration of every run of a command line; for a sweep, of every combination.

        Only the combinations of Hydra's basic sweeper are known in advance. For another sweeper this is one job with
        the first values that it may choose, and each of its jobs is checked when it starts (``__main__.run``).
        """
        overrides = self.parse(arguments)
        for override in overrides:
            if rule := self._broken_rule(override):
                raise UserError(f"{override.input_line} is invalid: {rule}.")
        swept = [override for override in overrides if override.is_sweep_override()]
        # Of a swept option the first choice, which has the keys that others set; values of keys are not needed yet.
        chosen = [override for override in overrides if override not in swept or self.options(override.key_or_group)]
        cfg = self.compose([line for override in chosen for line in _swept(override, every=False)])
        self.sweeps = multirun or cfg.hydra.mode == RunMode.MULTIRUN
        if not self.sweeps:
            if swept:
                line = str(swept[0].input_line)
                key, _, value = line.partition("=")
                other = ""
                if self.options(key) and key not in _ONE_EACH:
                    other = f", or write {shell_quoted(f'{key}=[{value}]')} for one run of them together"
                elif " " in value:
                    other = f", or quote a text that has a comma: {shell_quoted(f'{key}={quoted(value)}')}"
                elif isinstance(OmegaConf.select(cfg, key), ListConfig) or key == "task.seeds":
                    other = f", or write {shell_quoted(f'{key}=[{value}]')} for a list"
                raise UserError(f"{line} gives several values. Add -m for a run of each{other}.")
            check_effects(cfg, overrides)
            return [cfg]
        overrides = self.parse(f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items())
        overrides += self.parse(arguments)
        every = cfg.hydra.runtime.choices.get("hydra/sweeper") == "basic"
        values = {override.get_key_element(): _swept(override, every) for override in overrides}
        jobs = [self.compose(combination) for combination in itertools.product(*values.values())]
        for job in jobs:
            check_effects(job, overrides)
        return jobs


def _whole(arguments: Sequence[str], index: int) -> str:
    """Return the argument at ``index`` with those around it that a shell has cut off at a space.

    Such a part ends or begins with a separator, or is in open brackets.
    """
    begin, end = index, index + 1
    while begin and (arguments[begin][:1] in _SEPARATORS or arguments[begin - 1][-1:] in _SEPARATORS):
        begin -= 1
    whole = " ".join(arguments[begin:end])
    for following in arguments[end:]:
        is_open = sum(whole.count(bracket) for bracket in "[{") > sum(whole.count(bracket) for bracket in "]}")
        is_part = is_open or whole[-1:] in _SEPARATORS or following[:1] in _SEPARATORS
        if not is_part or "=" in following[1:]:
            break
        whole += f" {following}"
    return whole


def _with_home(override: Override) -> str:
    """Return the argument of ``override``, with the home folder for ``~`` at the beginning of each text in quotes."""
    home = os.path.expanduser("~/")
    return _QUOTED_HOME.sub(lambda quote: quote[1] + home.replace(quote[1], f"\\{quote[1]}"), str(override.input_line))


def _packaged() -> Path:
    return Path(str(files(CONFIG_MODULE) / "config.yaml")).parent


def _folders(sources: Iterable[str]) -> Iterator[Path]:
    """Yield the sources that are folders of this machine."""
    yield from (Path(source.removeprefix("file://")) for source in sources if source.startswith("file://"))


def _check_files(sources: Iterable[str]) -> None:
    packaged = _packaged()
    for folder in _folders(sources):
        for file in sorted(folder.glob(f"{EXPERIMENT}/**/[!.]*.yaml")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if not _HEADER.search(text):
                mark = ", and this one with a byte order mark. Save it as UTF-8 without" * text.startswith("\ufeff")
                raise UserError(f"{file} is invalid: an experiment's file must begin with `# @package _global_`{mark}.")
        for name in (file.relative_to(packaged) for file in packaged.rglob("*.yaml")):
            if (folder / name).is_file() and not (folder / name).samefile(packaged / name):
                raise UserError(
                    f"{folder / name} is invalid: the package has a file of that name, which Hydra takes. Rename it; "
                    f"values of any keys are an experiment, {folder}/experiment/<name>.yaml."
                )


def is_subkey(key: str, *roots: str) -> bool:
    """Return whether ``key`` is one of ``roots`` or below one."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


def named_options(override: Override) -> list[Any]:
    """Return the options of a group that ``override`` names: one, or those of a list or of a sweep."""
    value: Any = override.value()
    choices = value.list if isinstance(value, ChoiceSweep) else [value]
    return [option for choice in choices for option in (choice if isinstance(choice, list) else [choice])]


def adds(override: Override) -> bool:
    """Return whether ``override`` has a plus sign."""
    return override.is_add() or override.is_force_add()


def _swept(override: Override, every: bool) -> list[str]:
    """Return the arguments that a sweep makes of ``override``: of ``every`` value, or of the first one."""
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if isinstance(value, IntervalSweep) and not every:
        return [f"{key}={value.start}"]
    values: list[str] = []
    with suppress(ValueError, HydraException):
        values = list(override.sweep_string_iterator())
    if not values:
        rule = "Hydra's basic sweeper takes a list, choice(...) or range(...), not empty and with nothing beside it"
        raise UserError(f"{override.input_line} is invalid: {rule}. Write {key}=<value>,<value>.")
    return [f"{key}={each}" for each in values][: None if every else 1]


def application_config(cfg: DictConfig, run_dir: str | Path) -> DictConfig:
    """Return the configuration of a task: ``ConfigTree.compose`` without Hydra's part, resolved for ``run_dir``."""
    with without_hydra(cfg, run_dir) as application:
        OmegaConf.resolve(application)
        OmegaConf.to_container(application, throw_on_missing=True)
        return application


@contextmanager
def without_hydra(cfg: DictConfig, run_dir: str | Path) -> Iterator[DictConfig]:
    """Return the same configuration while it can be resolved."""
    cfg.hydra.runtime.output_dir = str(run_dir)  # as in the job
    with resolvable(cfg):
        application = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        application.run_dir = str(run_dir)
        OmegaConf.set_struct(application, True)
        yield application


@contextmanager
def resolvable(cfg: DictConfig) -> Iterator[None]:
    """Give ``${hydra:...}`` the values of a composed configuration, as in its job."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = cfg  # type: ignore[assignment]  # which set_config copies
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


# Where options are


def as_written(overrides: ListConfig | DictConfig) -> list[str]:
    """Return recorded overrides with their interpolations, which refer to another configuration than the record."""
    written: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(override) for override in written]


def own_sources(hydra: DictConfig) -> list[str]:
    """Return where Hydra, of this configuration, looked for options beside the package and itself."""
    return [
        f"file://{Path(hydra.runtime.cwd) / source.path}"
        if source.schema == "file"
        else f"{source.schema}://{source.path}"
        for source in hydra.runtime.config_sources
        if "command-line" in source.provider
    ]


def searched(sources: Sequence[str]) -> list[str]:
    """Return the override that makes Hydra look for options in ``sources``, if there are any."""
    return [f"hydra.searchpath=[{','.join(map(quoted, sources))}]"] if sources else []


def finding(sources: Sequence[str]) -> list[str]:
    """Return the same for a command that is printed: ``--config-dir``, which names one folder, where that is enough."""
    is_folder = len(sources) == 1 and sources[0].startswith("file://")
    return [f"--config-dir={sources[0].removeprefix('file://')}"] if is_folder else searched(sources)


# Names


_FORMS = {
    (dict, list): "it must be keys with values. Write '{key}={{<key>: <value>, ...}}'.",
    (list, dict): "it must be a list. Write '{key}=[<value>, ...]'.",
}


def check_names(tree: ConfigTree, arguments: Sequence[str]) -> None:
    """Raise UserError for an option that its group lacks, a key that the chosen options lack, a plus sign before one
    that they have, or a list in place of a mapping, or the other way round.
    """
    choices, values, added, deleted, renewed = [], [], [], list[str](), set[str]()
    for override in tree.parse(arguments):
        if is_option := bool(tree.options(override.key_or_group)) and not isinstance(override.value(), dict):
            _check_option(override, tree.options(override.key_or_group))
        if is_option or adds(override):
            choices.append(str(override.input_line))
            again = {root for root in deleted if is_subkey(override.key_or_group, root)}
            renewed |= again
            if not again and (override.is_add() or (is_option and adds(override))):
                added.append(override)
        elif override.is_delete():
            deleted.append(override.key_or_group)
        else:
            values.append(override)
    lines = [str(override.input_line) for override in added]
    present = tree.nodes([line for line in choices if line not in lines]) if added else {}
    chosen = tree.compose([]).hydra.runtime.choices if added else {}
    for line, override in zip(lines, added, strict=True):
        key, is_node = override.key_or_group, isinstance(override.value(), dict)
        if (key in chosen and not is_node) or not isinstance(present.get(key), dict | None):
            rule = f"{key} is there, and a plus sign adds what is not"
            raise UserError(f"{line} is invalid: {rule}. Write {line.lstrip('+')}.")
    choices = tree.forced(choices)
    known = tree.nodes(choices) if values else {}
    for override in values:
        key, value = override.key_or_group, override.value()
        if lost := next((root for root in deleted if is_subkey(key, root) and root not in renewed), None):
            raise UserError(f"{override.input_line} is invalid: ~{lost} deletes it. Leave one of them out.")
        if key not in known:
            raise UserError(_elsewhere(tree, key, known, choices) or _unknown_key(key, known, tree.groups()))
        default = known[key]
        if (kinds := (type(default), type(value))) in _FORMS:
            raise UserError(f"{override.input_line} is invalid: {_FORMS[kinds].format(key=key)}")
        if isinstance(default, dict) and isinstance(value, dict):
            if others := sorted(map(str, value.keys() - default.keys())):
                fix = f"Replace it by ~{key} '+{override.input_line}'" if default else f"Add +{key}.{others[0]}=<value>"
                raise UserError(
                    f"{override.input_line} is invalid: {key} has {', '.join(map(str, default)) or 'no keys'} and no "
                    f"{', '.join(others)}. {fix}."
                )


def _check_option(override: Override, options: list[str]) -> None:
    group = override.key_or_group
    for option in named_options(override):
        if str(option).removesuffix(".yaml") not in options and not (option is None and override.is_delete()):
            near = did_you_mean([f"{group}={name}" for name in nearest(str(option), options)])
            known = f"The options are {', '.join(options)}, by files that end in .yaml"
            raise UserError(f"There is no {group} named {option!r}.{near} {known}.")


def _nodes(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return the dotted key and the value of every node below ``tree``."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield f"{prefix}{key}", value
        yield from _nodes(value, f"{prefix}{key}.")


def _suggestions(key: str, known: Mapping[str, Any]) -> str:
    """Propose keys of ``known``, a mapping to their values; for a key of a callback that repeats another key, that."""
    named = [name for name in known if not any(part.startswith("_") or part.isdigit() for part in name.split("."))]
    near = []
    for name in nearest(key, named):
        repeated = _REPEATS.fullmatch(str(known[name])) if name.startswith("callbacks.") else None
        near.append(repeated[1] if repeated else name)
    return did_you_mean([*dict.fromkeys(near)])


def _elsewhere(tree: ConfigTree, key: str, known: Iterable[str], choices: Sequence[str]) -> str | None:
    """Return a message if other options of the group have the key, or if a task has it and none is chosen."""
    group = key.partition(".")[0]
    if group not in _ONE_EACH:
        return None
    chosen = tree.compose(choices).hydra.runtime.choices[group]
    is_chosen = any(line.startswith((f"{group}=", f"{EXPERIMENT}=")) for line in choices)
    default = "" if is_chosen else f", as no {group} is chosen"
    here = f"There is no key {key} with {group}={chosen}{default}"
    homes = [
        f"{group}={option}"
        for option in tree.options(group)
        if key in dict(_nodes(OmegaConf.to_container(tree.compose([f"{group}={option}"]), resolve=False)))
    ]
    if homes:
        parent, _, last = key.rpartition(".")
        beside = [name.removeprefix(f"{parent}.") for name in known if name.startswith(f"{parent}.")]
        near = did_you_mean([f"{parent}.{name}" for name in nearest(last, beside) if name != "reads"])
        return f"{here}.{near} {'These have' if len(homes) > 1 else 'This has'} it: {', '.join(homes)}."
    if (group, chosen) == ("task", "train"):
        others = ", ".join(option for option in tree.options(group) if option != chosen)
        return f"{here}, which has none. Choose one of {others} with task=<name>."
    return None


def _unknown_key(key: str, known: dict[str, Any], groups: list[str]) -> str:
    parts = key.split(".")
    for parent in itertools.accumulate(parts[:-1], lambda left, right: f"{left}.{right}"):
        if known.get(parent, "") is None:
            rule = f"{parent} is null in the chosen {parts[0]}, so it has no keys"
            return f"There is no key {key} here: {rule}. All of them are set by {parent}={{<key>:<value>,...}}."
    ours = {name: known[name] for name in known if (parts[0] == "hydra") == (name.partition(".")[0] == "hydra")}
    near = _suggestions(key, ours | dict.fromkeys(groups) if parts[0] != "hydra" else ours)
    if parts[0] in ("callbacks", "logger", "reward") and len(parts) > 2 and ".".join(parts[:2]) not in known:
        members = [name.partition(".")[2] for name in ours if name.rpartition(".")[0] == parts[0]]
        similar = [".".join([parts[0], name, *parts[2:]]) for name in nearest(parts[1], members)]
        near = did_you_mean(similar) or f" {parts[0]} has {', '.join(members)}."
    parent = key.rpartition(".")[0]
    keys = known.get(parent) if (parent == "task" or "." in parent) and parts[0] != "hydra" else None
    if isinstance(keys, dict) and (parent == "task" or "_target_" not in keys):
        from solrl_lightning.options.run import Run

        names = dict.fromkeys([*keys, *Run.defaults(parent)])
        near = f" {parent} has {', '.join(name for name in names if not name.startswith('_') and name != 'reads')}."
    target = known.get(f"{parent}._target_")
    adding = f" Write +{key}=<value> if {target} takes it." if target and parts[0] != "task" else ""
    if parts[0] in ("callbacks", "logger", "reward") and len(parts) == 2:
        adding = f" A plus sign adds one, as in +{key}={{_target_:<class>}}."
    return f"There is no key {key}.{near}{adding} --help lists the common ones, --cfg job shows all."


def check_choices(cfg: DictConfig) -> None:
    """Raise UserError unless ``cfg``, as composed, has one option of each group that a run needs, and its keys."""
    for group in ("old_policy", *cfg.hydra.runtime.choices):
        if cfg.get(group, "") is None:  # a name in a YAML file with nothing below it
            raise UserError(f"{group}=null is invalid: it must be a group of keys. Leave it out for the default.")
    for group in _ONE_EACH:
        if not isinstance(cfg.hydra.runtime.choices.get(group), str):
            raise UserError(f"A run has one {group}, no list and no null. Choose it with {group}=<option>.")


def check_effects(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Raise UserError for what has no effect: ``{}`` over keys, with which Hydra merges it; in a user's file an option
    as the value of its group, a key with dots or a key of commands; a key at the root that nothing reads.
    """
    for override in overrides:
        key = override.key_or_group.replace("/", ".")
        if override.value() == {} and OmegaConf.select(cfg, key):
            rule, fix = f"{key} has keys, and an empty mapping removes none", f"{key}.<key>=null or ~{key}.<key>"
            raise UserError(f"{override.input_line} is invalid: {rule}. Leave it out, or change one with {fix}.")
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, value in values.items():
        lines = [o.input_line for o in overrides if o.key_or_group.replace("/", ".").partition(".")[0] == key]
        group, *parts = str(key).split(".")
        if key in _OF_COMMANDS and not lines and value != _root()[key]:
            rule = _OF_COMMANDS[key]
        elif key in cfg.hydra.runtime.choices and isinstance(value, str | list):
            rule = f"an option is chosen in the defaults list. Write `- override /{key}: {value}` there"
        elif parts and group in _root():
            nested = reduce(lambda below, part: f"{{{part}: {below}}}", reversed(parts), str(value))
            rule = f"dots are for command lines. Write `{group}: {nested}` there"
        elif key not in _root():
            known = {name: below for name, below in values.items() if name in _root() and name != "hydra"}
            rule = (
                f"{key} is neither a group nor a key of the configuration, so nothing reads it."
                f"{_suggestions(str(key), dict(_nodes(known)))} --help lists both, --cfg job shows all keys"
            )
        else:
            continue
        culprit = " ".join(map(str, lines)) or f"{key}: {value} in a file of your own"
        raise UserError(f"{culprit} is invalid: {rule}.")


@cache
def _root() -> dict[str, Any]:
    """Return the values of the keys at the root of the package's configuration, groups among them."""
    root: Any = OmegaConf.to_container(OmegaConf.create((files(CONFIG_MODULE) / "config.yaml").read_text()))
    groups = {group for entry in root.pop("defaults") if isinstance(entry, dict) for group in entry}
    return {**dict.fromkeys(groups - {EXPERIMENT, "override hydra/help"}), **root}
