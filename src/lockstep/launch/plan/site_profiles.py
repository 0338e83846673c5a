"""Site profiles: what a computing center documents for its machine, as data.

A profile is a YAML file in `sites/`, in the user's configuration folder, or named by `--site FILE` or LOCKSTEP_SITE.
`find_site` is the only lookup. A profile adds to a job only what neither the environment nor a flag determines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from string import Template

from lockstep.config.mapping import from_mapping
from lockstep.errors import ConfigError, plural, require
from lockstep.files.untrusted import read_yaml
from lockstep.launch.node.hardware import parse_cpus
from lockstep.launch.plan.job_plan import JobPlan

FOLDER = Path(__file__).with_name("sites")
SITE = "LOCKSTEP_SITE"
NO_SITE = "none"
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
# Variables that decide which code a program, a shell or a library loads.
LOADING = re.compile(
    r"(LD|DYLD|BASH)_\w*|(PYTHON|PERL5)\w*|PATH|ENV|SHELLOPTS|PS4|IFS|GCONV_PATH|FI_PROVIDER_PATH|NCCL_CONF_FILE"
    r"|\w*_(PLUGIN|INJECTION64_PATH|MODULE_DIR)"
)
COMMANDS = re.compile(r"[;&|<>`]|\$\(")  # with which a command contains or starts another one
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Site:
    """A center's machine.

    Args:
        host: Regular expression that matches a whole host name there.
        when: Variables, each with a regular expression for its whole value; any of them identifies the machine.
        launcher: The program with which the center's users start workers.
        workers: Workers per node.
        binding: CPUs of each worker of a node, such as "1-8,105-112", in the order of local ranks.
        interfaces: Network interfaces of jobs on several nodes.
        plugin: Names by which NCCL may report the right network plugin.
        variables: Variables of all jobs; $NAME is replaced by the launcher's variable.
        network: Variables only of jobs on several nodes.
        allocation: Options of the batch system that such a job needs.
        modules: Commands that a batch script starts with.
        torch: The version that the center documents.
        source: Where the center documents this; `date` is the day of that text.
        unconfirmed: What the source does not state.
    """

    name: str = ""
    about: str = ""
    host: str = ""
    when: dict[str, str] = field(default_factory=dict)
    launcher: str = ""
    workers: int = 0
    binding: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    plugin: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    network: dict[str, str] = field(default_factory=dict)
    allocation: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    torch: str = ""
    source: str = ""
    date: str = ""
    unconfirmed: str = ""

    def __post_init__(self) -> None:
        for key in ("source", "date"):
            require(getattr(self, key), key, "missing", "stated, so that readers can check the profile")
        for key, value in described(self):
            require(value.isprintable(), key, repr(value), "one line without control characters")
        for key, value in [("allocation", each) for each in self.allocation]:
            require(not re.search(r"`|\$\(", value), key, repr(value), "options without ` and $(")
        for key, value in [("modules", each) for each in self.modules]:
            require(not COMMANDS.search(value), key, repr(value), "one command, without ; & | < > ` and $(")
        for name in (*self.when, *self.variables, *self.network):
            require(bool(VARIABLE.fullmatch(name)), "variable", repr(name), "a name of letters, digits and _")
        for pattern in (self.host, *self.when.values()):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{pattern!r}: not a regular expression: {error}") from None
        for cores in self.binding:
            require(bool(CORES.fullmatch(cores)), "binding", repr(cores), 'a list of CPUs, such as "0-7,64-71"')
        require(self.workers >= 0, "workers", self.workers, "at least 0")
        if self.binding and len(self.binding) != self.workers:
            raise ConfigError(
                f"binding has {len(self.binding)} entries, but workers is {self.workers}; list one for each"
            )

    def matches(self, environment: Mapping[str, str], hosts: frozenset[str]) -> bool:
        """Whether this machine is the site's, by its names or by the variables."""
        named = self.host and any(re.fullmatch(self.host, host) for host in hosts)
        return bool(named) or any(re.fullmatch(value, environment.get(key, "")) for key, value in self.when.items())

    @property
    def cpus_per_worker(self) -> int:
        """The number of CPUs that `binding` lists for a worker, at most; 0 without lists."""
        return max((len(parse_cpus(cores)) for cores in self.binding), default=0)

    @property
    def loading(self) -> list[str]:
        """The variables that decide which code is loaded."""
        return [name for name in (*self.variables, *self.network) if LOADING.fullmatch(name)]

    @property
    def origin(self) -> str:
        """The profile's name and source, for listings."""
        return f"site {self.name} ({self.source}, {self.date})"


def find_site(choice: str | None, environment: Mapping[str, str], hosts: frozenset[str]) -> Site | None:
    """Return the profile that `--site` or LOCKSTEP_SITE names, or the one that this machine matches, or None.

    Args:
        choice: A profile's name, a YAML file, or "none"; None: LOCKSTEP_SITE, or else the profile that matches.
        hosts: The names of this machine.

    Raises:
        ConfigError: The profile is unknown or invalid, or several match; or it determines which code is loaded, and is
            not a file that --site or LOCKSTEP_SITE names: the environment could do the same itself.
    """
    site = _find_site(choice, environment, hosts)
    if site and site.loading and not is_file(choice if choice is not None else environment.get(SITE, "")):
        names = ", ".join(site.loading)
        raise ConfigError(f"site {site.name} sets {names}, with which it can run code: name its file by --site FILE")
    return site


def is_file(choice: str) -> bool:
    """Whether a choice of a profile names a file."""
    return Path(choice).suffix in (".yaml", ".yml")


def _find_site(choice: str | None, environment: Mapping[str, str], hosts: frozenset[str]) -> Site | None:
    flag = "--site" if choice is not None else SITE
    choice = choice if choice is not None else environment.get(SITE)
    if choice == NO_SITE:
        return None
    if choice:
        return site_named(choice, environment, f"{flag} {choice}")
    found = [site for site in sites(environment).values() if site.matches(environment, hosts)]
    if len(found) > 1:
        names = ", ".join(site.name for site in found)
        raise ConfigError(f"this machine matches the sites {names}; choose one with --site, or add --site none")
    return found[0] if found else None


def sites(environment: Mapping[str, str]) -> dict[str, Site]:
    """Return all profiles by name; one in the user's folder replaces the package's of the same name.

    Raises:
        ConfigError: A file is invalid.
    """
    return {path.stem: read_site(path) for path in _paths(environment).values()}


def _paths(environment: Mapping[str, str]) -> dict[str, Path]:
    paths = [*FOLDER.glob("*.yaml"), *user_folder(environment).glob("*.yaml")]
    return {path.stem: path for path in sorted(paths, key=lambda path: (path.parent != FOLDER, path.stem))}


def user_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the user's own profiles."""
    config = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or "/nonexistent") / ".config"
    return Path(config) / "lockstep" / "sites"


def site_named(choice: str, environment: Mapping[str, str], said: str) -> Site:
    """Return the profile of a name, or in a YAML file.

    Args:
        said: What the user gave, for messages.

    Raises:
        ConfigError: The profile is unknown or invalid.
    """
    paths = _paths(environment)
    if choice in paths:
        return read_site(paths[choice])
    if is_file(choice):
        return replace(read_site(Path(choice)), name=choice)
    near = get_close_matches(choice, paths, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use a .yaml file, or one of {', '.join(sorted(paths))}"
    raise ConfigError(f"{said}: unknown site; {hint}")


def read_site(path: Path) -> Site:
    """Read a profile.

    Raises:
        ConfigError: The file cannot be read, or is not a valid profile.
    """
    try:
        values = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"site profile {path}: cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"site profile {path}: not YAML: {error}") from None
    site = from_mapping(Site, values, f"site profile {path}")
    return replace(site, name=path.stem)


def with_site(plan: JobPlan, site: Site, is_bound: bool) -> JobPlan:
    """Return the plan with what the profile adds, and a note for each addition and for what takes precedence.

    Args:
        is_bound: Whether --bind determines the binding.
    """
    own = plan.own_environment
    wanted = {**site.variables, **({} if plan.is_local else site.network)}
    added = {name: Template(value).safe_substitute(own) for name, value in wanted.items() if name not in own}
    notes = [f"{name}: {site.origin}" for name in added]
    notes += [f"{name}: from the environment, instead of site {site.name}" for name in wanted if name in own]
    plan = replace(plan, environment={**plan.environment, **added})
    if site.interfaces and not plan.is_local:
        named = [name for name in INTERFACE_VARIABLES if name in own]
        if plan.interfaces or named:
            whose = "from --interface" if plan.interfaces else f"from {named[0]} in the environment"
        else:
            whose, plan = site.origin, replace(plan, interfaces=site.interfaces)
        notes.append(f"interfaces: {whose}")
    if site.binding:
        fits = all(node.workers <= site.workers for node in plan.nodes)
        if is_bound:
            notes.append("binding: from --bind")
        elif not fits:
            notes.append(f"binding: none, because site {site.name} lists CPUs of {site.workers} workers per node")
        else:
            plan = replace(plan, bind=f"list:{':'.join(site.binding)}")
            notes.append(f"binding to CPUs {' '.join(site.binding)}: {site.origin}")
    line = f"site {site.name}: {plural(len(notes), 'setting')}; --dry-run lists them, --site none turns them off"
    return replace(plan, notes=(*plan.notes, *([line] if notes else [])), site_notes=tuple(notes))


def described(site: Site) -> list[tuple[str, str]]:
    """Return the profile's keys and values as text, without empty ones."""
    rows = []
    for item in fields(site):
        value = getattr(site, item.name)
        if isinstance(value, dict):
            rows += [(item.name, f"{name}={text}") for name, text in value.items()]
        elif isinstance(value, tuple):
            rows += [(item.name, each) for each in value]
        elif value:
            rows.append((item.name, str(value)))
    return rows
