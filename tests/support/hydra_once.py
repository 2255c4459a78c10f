"""What Hydra does in each process alike is done once, in the process that forks them (`zygote.py`).

A composition is most of a launcher's time. Each function here replaces one of Hydra's by one that
gives the same: what is kept is used only where the process has the files and plugins that it is of.
"""

import copy
import functools
import os
import pickle
from pathlib import Path

import hydra._internal.core_plugins
import omegaconf.omegaconf
import yaml
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.hydra import Hydra
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, _utils, base

import hydra_plugins

TREE = str(Path(__file__).parents[2])
LAUNCHERS = ("basic", "local", "slurm")
PREFIX = ResultDefault(config_path="what is merged first")
WORDS = r"""
hydra/launcher=local
hydra.launcher.progress=plain
hydra.sweep.dir='/dev/shm/pytest-60/popen-gw2/test_a_job_Zq0/x y/sweep'
hydra.run.dir=job,true,null
resilience=debug
resilience.requeue.max_failures=1
resilience.checkpoint.dir='${hydra:runtime.output_dir}/mine'
+command_line=["bash","-c","true && x > $y"]
+lr=0.1,2e-3,10
++holds={limit:1,deaf:12}
kind=a,b,c
a=[1,{b: null}]
b='${c}'
~a.b
"""
"""Overrides of the kinds that tests give: antlr makes a table of each letter that it sees."""


def use(policy):
    """Keep it all; `policy` is the schema of a policy."""
    read = read_once()
    merge_once(read)
    scan_once()
    map_if_needed()
    copy_by_pickle()
    write_in_c()
    parse_once(policy)
    assume_no_mode()


class Kept(ConfigResult):
    """One of the files: its config is needed only where it is not merged already."""

    def __init__(self, found, config):
        self._pickled = config
        vars(self).update(pickle.loads(found), _config=None)

    @property
    def config(self):
        if self._config is None:
            self._config = pickle.loads(self._pickled)
        return self._config

    @config.setter
    def config(self, config):
        self._config = config


def read_once():
    """Cache the files of Hydra and the presets, whose reading dominates a composition."""
    read, really = {}, ConfigRepository.load_config

    def load_config(self, config_path):
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        name = source and (str(source), config_path)
        return Kept(*read[name]) if name in read else really(self, config_path)

    every = sources()
    presets = [path.relative_to(f"{TREE}/conf") for path in Path(TREE, "conf").rglob("*.yaml")]
    of_hydra = ["env", "job_logging", "hydra_logging", "hydra_help", "help", "output"]
    others = [*(f"hydra/{group}/default" for group in of_hydra), "hydra/sweeper/basic"]
    others += ["hydra/launcher/basic", "hydra/config"]
    for name in [*(str(path.with_suffix("")) for path in presets), *others]:
        source = every._find_object_source(name, ObjectType.CONFIG)
        found = every.load_config(name)
        config = pickle.dumps(vars(found).pop("config"))
        read[str(source), name] = pickle.dumps(vars(found)), config
    ConfigRepository.load_config = load_config
    ConfigRepository.__deepcopy__ = lambda self, memo: copy.copy(self)  # its sources never change
    return every


def sources():
    """The places of Hydra's configs and of the presets."""
    every = ConfigRepository.__new__(ConfigRepository)
    every.config_search_path = None
    every.sources = [
        FileConfigSource("forge", f"file://{TREE}/conf"),
        ImportlibResourcesConfigSource("hydra", "pkg://hydra.conf"),
        StructuredConfigSource("schema", "structured://"),
    ]
    return every


def merge_once(every):
    """Hydra's own configs are merged first, to the same for each launcher."""
    merged, really = {}, ConfigLoaderImpl._compose_config_from_defaults_list
    load = ConfigLoaderImpl._load_single_config
    parser = OverridesParser.create()
    for launcher in LAUNCHERS:
        repository = CachingConfigRepository(every)
        given = parser.parse_overrides([f"hydra/launcher={launcher}"])
        found = defaults_list.create_defaults_list(
            repository, None, given, prepend_hydra=True, skip_missing=True
        ).defaults
        first = found[: [one.config_path for one in found].index("hydra/config") + 1]
        loader = ConfigLoaderImpl.__new__(ConfigLoaderImpl)
        merged[tuple(map(repr, first))] = pickle.dumps(really(loader, first, repository))

    def merge(self, defaults, repo):
        for first, config in merged.items():
            rest = defaults[len(first) :]
            if tuple(map(repr, defaults[: len(first)])) == first and all(
                isinstance(repo.load_config(one.config_path), Kept)
                for one in defaults[: len(first)]
            ):
                repo.cache[f"config_path={PREFIX.config_path}"] = config
                return really(self, [PREFIX, *rest], repo)
        return really(self, defaults, repo)

    def load_single(self, default, repo):
        if default is not PREFIX:
            return load(self, default, repo)
        found = copy.copy(repo.load_config("hydra/config"))
        found.config = pickle.loads(repo.load_config(PREFIX.config_path))
        return found

    ConfigLoaderImpl._compose_config_from_defaults_list = merge
    ConfigLoaderImpl._load_single_config = load_single


def scan_once():
    """The plugins are imported once, for processes that would find the same."""
    modules = [hydra._internal.core_plugins, hydra_plugins]
    really = Plugins._scan_all_plugins

    def places():
        return [set(module.__path__) for module in modules]

    found, known = really(modules), places()

    def scan(modules):
        return found if places() == known else really(modules)

    Plugins._scan_all_plugins = staticmethod(scan)


def map_if_needed():
    """What a list of defaults can interpolate is a config, made for each file, and rarely used."""
    really = defaults_list._create_interpolation_map

    def create(overrides, defaults, self_added):
        if any(one.is_interpolation() for one in defaults):
            return really(overrides, defaults, self_added)
        return None

    defaults_list._create_interpolation_map = create


def assume_no_mode():
    """No config of the tests sets `hydra.mode`: Hydra composes each config only to read it."""
    Hydra.get_mode = lambda self, config_name, overrides: None


def compose_once():
    """Cache compositions: Hydra composes each config of a sweep twice, to check and to run it.

    The second composition takes half of a launcher's time. Others differ in overrides alone, so
    the files are merged once. A cached config is copied by pickle, in a third of the time of
    copy.deepcopy.
    """
    composed, really = {}, ConfigLoaderImpl._load_configuration_impl
    merged, merge = {}, ConfigLoaderImpl._compose_config_from_defaults_list

    def load(self, **given):
        name, overrides, mode = (given[one] for one in ("config_name", "overrides", "run_mode"))
        key = (name, *overrides, mode, str(self.config_search_path), os.getcwd())
        if key not in composed:
            composed[key] = pickle.dumps(really(self, **given))
        elif given["validate_sweep_overrides"]:
            parsed = OverridesParser.create().parse_overrides(overrides)
            self.validate_sweep_overrides_legal(parsed, mode, given["from_shell"])
        return pickle.loads(composed[key])

    def merge_defaults(self, defaults, repo):
        key = (*map(repr, defaults), str(self.config_search_path), os.getcwd())
        if key not in merged:
            merged[key] = pickle.dumps(merge(self, defaults, repo))
        return pickle.loads(merged[key])

    ConfigLoaderImpl._load_configuration_impl = load
    ConfigLoaderImpl._compose_config_from_defaults_list = merge_defaults
    list_once()


def list_once():
    """Cache lists of defaults: those of the jobs of a sweep differ only if they choose configs."""
    listed, really = {}, config_loader_impl.create_defaults_list

    def create(repo, config_name, overrides_list, prepend_hydra, skip_missing):
        choosing, others = [], []
        for one in overrides_list:
            if not one.is_sweep_override():
                chooses = repo.group_exists(one.key_or_group) and not isinstance(one.value(), dict)
                (choosing if chooses else others).append(one)
        how = (config_name, prepend_hydra, skip_missing)
        places = (os.getcwd(), *map(str, repo.get_sources()))
        key = (how, *(one.input_line for one in choosing), *places)
        if key not in listed:
            listed[key] = pickle.dumps(really(repo, config_name, choosing, *how[1:]))
        found = pickle.loads(listed[key])
        found.config_overrides = found.overrides.config_overrides = others
        return found

    config_loader_impl.create_defaults_list = create


def write_in_c():
    """YAML is a tenth of a launcher's time; the emitter in C writes the same."""

    class Dumper(yaml.CDumper):
        pass

    Dumper.add_representer(str, _utils.OmegaConfDumper.str_representer)
    omegaconf.omegaconf.get_omega_conf_dumper = lambda: Dumper


def copy_by_pickle():
    """Copy configs as compositions are copied: copies are a seventh of a launcher's time."""
    really = DictConfig.__deepcopy__

    def deepcopy(self, memo):
        parent, self.__dict__["_parent"] = self.__dict__["_parent"], None
        try:
            found = pickle.loads(pickle.dumps(self))
        except Exception:  # noqa: BLE001 - a value that only copy.deepcopy can copy
            found = really(self, memo)
        finally:
            self.__dict__["_parent"] = parent
        found.__dict__["_parent"] = parent
        return found

    DictConfig.__deepcopy__ = deepcopy


def parse_once(policy):
    """Parse and merge what is typical: the first time, antlr and ABCs build their tables.

    The same text has the same tree, which nobody changes.
    """
    _utils.parse = base.parse = functools.cache(base.parse)
    parsed, really = {}, OverridesParser.parse_rule

    def parse_rule(self, text, rule):
        if (text, rule) not in parsed:
            parsed[text, rule] = really(self, text, rule)
        found = parsed[text, rule]
        return copy.copy(found) if isinstance(found, Override) else found

    OverridesParser.parse_rule = parse_rule
    OverridesParser.create().parse_overrides(WORDS.split("\n")[1:-1])
    config = OmegaConf.create({"a": "${b.c}/x", "b": {"c": "${oc.env:PATH}", "d": [1, "${a}"]}})
    OmegaConf.merge(OmegaConf.structured(policy), {"enabled": True})
    OmegaConf.to_container(copy.deepcopy(config), resolve=True)
    OmegaConf.to_yaml(config)
