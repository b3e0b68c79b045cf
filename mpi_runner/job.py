"""What one `run` is asked to do: command line over TOML file over defaults, checked."""

import math
import os
import re
import stat
import tomllib
from dataclasses import asdict, dataclass, fields, replace

from kda_engine.engines import ENGINES
from kda_engine.errors import InputError
from kda_engine.options import Options
from kda_engine.regular_file import what_is

CHOICES = {
    "engine": ("auto", *ENGINES),
    "scan": ("auto", "neighbour", "chain", "allgather", "heads", "exscan", "levels", "serial"),
    "transport": ("auto", "mpi", "ipc", "nccl", "device"),
    "shard": ("tokens", "heads"),
    "io": ("auto", "direct", "gather", "shards"),
}
NOT_BUILT = {"transport": ("ipc", "nccl", "device")}

# Fields of Options that the input file fixes; saying them again may only confirm them.
OPERATOR_OPTIONS = ("gate", "lower_bound", "beta", "qk_l2norm", "scale", "state_layout")


@dataclass(frozen=True)
class Job:
    """A resolved run. Field names are the command line's long options (and the TOML keys) with underscores.

    expected: operator options that were said beside the input file's, a dict; they must agree with it.
    """

    input: str
    output: str
    backward: bool = False
    engine: str = "auto"
    scan: str = "auto"
    transport: str = "auto"
    shard: str = "tokens"
    decay_skip: str | None = None
    tolerance: float = 0.0
    reproducible: bool = False
    check_finite: bool = False
    require_finite: bool = False
    allow_external: bool = False
    save_boundary: bool = False
    io: str = "auto"
    oversubscribe: bool = False
    exchange_timeout: float = 600.0
    dry_run: bool = False
    json: bool = False
    force: bool = False
    expected: dict | None = None

    @classmethod
    def resolve(cls, given, config):
        """given: what the command line says (absent options left out); config: a TOML path or None.

        Raises InputError for unknown keys, values of the wrong type, and what is documented but not built yet.
        """
        merged = {**(_read_toml(config) if config else {}), **given}
        operator = {name: merged.pop(name) for name in OPERATOR_OPTIONS if name in merged}
        known = {field.name: field for field in fields(cls) if field.name != "expected"}
        for name, value in merged.items():
            if name not in known:
                raise InputError(f"{config}: unknown option {name!r}; known are {', '.join(sorted(known))}")
            _check(name, value, known[name])
        for name in ("input", "output"):
            if name not in merged:
                raise InputError(f"{name}: expected a file name")
        job = cls(**merged, expected=operator)
        for name, values in NOT_BUILT.items():
            if getattr(job, name) in values:
                raise InputError(f"{name}: {getattr(job, name)!r} is not built yet")
        if job.reproducible:
            _check_reproducible(job)
        if _is_one_file(job.input, job.output):
            raise InputError(f"output: expected another file than the input, got {job.output} for both")
        return job

    @property
    def carrier(self):
        """The transport that is used."""
        return "mpi" if self.transport == "auto" else self.transport

    def options(self, of_file, K):
        """The file's Options with this run's decay skip. Raises InputError where the job contradicts the file.

        K: the key size, on which a scale that was left out depends.
        """
        for name, value in self.expected.items():
            # Through Options, so that the value is checked and both sides have one type.
            meant = lambda options: options.scale_for(K) if name == "scale" else getattr(options, name)
            said, found = meant(Options(**{name: value})), meant(of_file)
            if said != found:
                raise InputError(f"{name}: {self.input} says {found!r}, the job says {said!r}")
        return replace(of_file, decay_skip=self.decay_skip, tolerance=self.tolerance)

    def to_dict(self):
        """Plain types, for the report."""
        return asdict(self)


def _check_reproducible(job):
    """Raises InputError for what `--reproducible` does not go with."""
    for name, allowed in (("scan", ("auto", "chain", "serial")), ("shard", ("tokens",)),
                          ("engine", ("auto", "numpy", "reference"))):
        if getattr(job, name) not in allowed:
            raise InputError(f"reproducible: expected {name} {', '.join(allowed[:-1])} or {allowed[-1]} beside it, got "
                             f"{getattr(job, name)}" if len(allowed) > 1 else
                             f"reproducible: expected {name} {allowed[0]} beside it, got {getattr(job, name)}")
    if job.tolerance > 0 or job.decay_skip not in (None, "exact"):
        raise InputError("reproducible: expected decay skip exact beside it; certified and sampled are not built yet")


def _is_one_file(one, other):
    """Whether two names lead to one file; links may lead nowhere or in a circle."""
    try:
        return os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError) as error:
        raise InputError(f"{one}, {other}: expected names of files, got: {getattr(error, 'strerror', error)}") from None


def _read_toml(path):
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise InputError(f"config: cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(mode):
        # To open a fifo would wait for somebody who writes into it.
        raise InputError(f"config: cannot read {path}: expected a file, got {what_is(mode)}")
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise InputError(f"config: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise InputError(f"config: {path} is not TOML: {error}") from None
    except RecursionError:
        raise InputError(f"config: {path}: expected options and their values, got lists or tables nested too deep"
                         ) from None
    return {name.replace("-", "_"): value for name, value in content.items()}


def _check(name, value, field):
    kind = (int, float) if field.type is float else field.type
    expected = getattr(field.type, "__name__", field.type)
    if not isinstance(value, kind) or (field.type is not bool and isinstance(value, bool)):
        raise InputError(f"{name}: expected {expected}, got {_shown(value)}")
    if name == "shard" and re.fullmatch(r"[1-9]\d*x[1-9]\d*", value):
        raise InputError(f"shard: {value!r} is not built yet")
    if field.type is float:
        _check_range(name, value)
    if name in CHOICES and value not in CHOICES[name]:
        raise InputError(f"{name}: expected one of {', '.join(CHOICES[name])}, got {value!r}")
    if name == "exchange_timeout" and not 0 < value < math.inf:
        raise InputError(f"exchange_timeout: expected a finite number of seconds above 0, got {value!r}")


def _check_range(name, value):
    """Whole numbers of a TOML file may have any number of digits."""
    try:
        float(value)
    except OverflowError:
        raise InputError(f"{name}: expected a number that float64 holds, got one of {len(str(abs(value)))} digits"
                         ) from None


def _shown(value):
    """What came, cut short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"
