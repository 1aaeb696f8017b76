"""What the suite does once, or in less time, where its runs would repeat it: compositions, charts, try-outs."""

import copy
import functools
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import omegaconf
import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, grammar_parser
from omegaconf.base import Metadata
from yaml import YAMLError
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser
from yaml.resolver import Resolver

RARELY = 20_000, 20, 20
"""Thresholds of garbage collection, which by default takes a fifth of an import and a tenth of a run."""


def compose_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what Hydra reads and composes of the package's files and choices; it applies values each time."""
    kept = dict[Any, bytes]()

    def held(repo: Any) -> tuple[Any, ...]:
        """Return what the sources have: the places of packages, and the files of folders, which a test may change."""
        return tuple(
            (source.path, *((str(file), file.read_bytes()) for file in sorted(Path(source.path).rglob("*.yaml"))))
            if source.scheme() == "file"
            else source.path
            for source in repo.get_sources()
        )

    read = ConfigRepository.load_config

    def read_once(self: ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() == "file":
            return read(self, config_path)
        key = "file", source.path, source.provider, config_path
        if key not in kept:
            kept[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(kept[key])

    choose = defaults_list._create_defaults_list

    def chosen_once(repo: Any, config_name: Any, overrides: Overrides, **flags: bool) -> Any:
        choices = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}
        key = "choices", held(repo), config_name, *flags.values(), pickle.dumps(choices)
        if key not in kept:
            defaults, tree = choose(repo, config_name, overrides, **flags)
            kept[key] = pickle.dumps((defaults, tree, {name: getattr(overrides, name) for name in choices}))
        defaults, tree, choices = pickle.loads(kept[key])
        vars(overrides).update(choices)
        return defaults, tree

    merge = ConfigLoaderImpl._compose_config_from_defaults_list

    def merged_once(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        key = "composition", held(repo), pickle.dumps(defaults)
        if key not in kept:
            kept[key] = pickle.dumps(merge(self, defaults, repo))
        return pickle.loads(kept[key])

    list_options, groups = ConfigLoaderImpl.get_group_options, dict[Any, list[str]]()

    def listed_once(self: ConfigLoaderImpl, group_name: str, *args: Any, **kw: Any) -> list[str]:
        sources = (*(source.path for source in self.get_search_path().get_path()),)
        if any(not path.startswith(("pkg://", "structured://")) for path in sources):
            return list_options(self, group_name, *args, **kw)
        key = sources, group_name, *args, *kw.values()
        if key not in groups:
            groups[key] = list_options(self, group_name, *args, **kw)
        return list(groups[key])

    parse, parsed = OverridesParser.parse_rule, dict[Any, bytes]()

    def parsed_once(self: OverridesParser, s: str, rule_name: str) -> Any:
        if (s, rule_name) not in parsed:
            parsed[s, rule_name] = pickle.dumps(parse(self, s, rule_name))
        return pickle.loads(parsed[s, rule_name])

    def share(self: CachingConfigRepository, repo: Any) -> None:
        self.delegate, self.cache = copy.copy(repo), {}  # whose list of sources is replaced, and not changed

    for user_of_the_grammar in (omegaconf.base, omegaconf._utils):
        patch.setattr(user_of_the_grammar, "parse", functools.cache(grammar_parser.parse))
    patch.setattr(OverridesParser, "parse_rule", parsed_once)
    patch.setattr(ConfigLoaderImpl, "get_group_options", listed_once)
    patch.setattr(CachingConfigRepository, "__init__", share)
    patch.setattr(ConfigRepository, "load_config", read_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merged_once)
    patch.setattr(defaults_list, "_create_defaults_list", chosen_once)


def compose_in_less_time(patch: pytest.MonkeyPatch) -> None:
    """Do what Hydra and OmegaConf do most often as they do it, in less time."""
    interpolate = defaults_list._create_interpolation_map

    def interpolated(overrides: Overrides, defaults: Any, self_added: bool) -> DictConfig:
        """Return the choices for the interpolations of a defaults list; the package's have none."""
        has_some = any("$" in str(vars(default)) for default in defaults)
        return interpolate(overrides, defaults, self_added) if has_some else DictConfig({})

    loader = omegaconf._utils.get_yaml_loader()

    class InC(CParser, loader):  # type: ignore[misc, valid-type]
        """Composes the nodes of a YAML file by libyaml, and constructs their values as OmegaConf does."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream
            CParser.__init__(self, stream)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

        def get_single_data(self) -> Any:
            try:
                return super().get_single_data()
            except YAMLError:  # in the words of PyYAML's own parser
                if not isinstance(self.stream, str | bytes):
                    self.stream.seek(0)
                return loader(self.stream).get_single_data()

    def copied(self: Metadata, memo: Any) -> Metadata:
        """Return a deep copy, whose values but these two cannot be changed."""
        other = object.__new__(type(self))
        resolved = copy.deepcopy(self.resolver_cache, memo) if self.resolver_cache else defaultdict(dict)
        vars(other).update(vars(self), flags=self.flags and dict(self.flags), resolver_cache=resolved)
        return other

    patch.setattr(defaults_list, "_create_interpolation_map", interpolated)
    patch.setattr(omegaconf._utils, "get_yaml_loader", lambda: InC)
    patch.setattr(Metadata, "__deepcopy__", copied, raising=False)


def draw_once(patch: pytest.MonkeyPatch) -> None:
    """Draw the first chart of reports, and give the others its picture; the fixture ``drawn_charts`` draws all."""
    from solrl_lightning.study import report

    draw, drawn = report.draw_chart, list[str]()

    def chart(title: str, *args: Any, note: str = "", **kw: Any) -> Any:
        if not drawn:
            drawn.append(draw(title, *args, note=note, **kw).svg)
        return report.Chart(title, drawn[0], [], note)

    patch.setattr(report, "draw_chart", chart)


def try_out_once(patch: pytest.MonkeyPatch) -> None:
    """Make the embedded model on the device meta, before it is loaded, once with each set of options."""
    from solrl_lightning import build
    from solrl_lightning.sizing import plan  # noqa: F401  # keeps the function, whose policy it takes

    make, fits = build.policy_on_meta, set[str]()

    def made_once(node: Any) -> None:
        options = str({name: value for name, value in node.items() if name != "embeddings"})
        if node["pretrained"] != "tiny" or options not in fits:
            make(node)
            fits.add(options)

    patch.setattr(build, "policy_on_meta", made_once)
