"""Golden files: a problem and the reference's results in one file, sealed by checksums."""

import hashlib
import os
from dataclasses import dataclass

import numpy as np

from ..cases import Case
from ..compare import TIERS, tier_of, tolerances_of
from ..errors import InputError
from . import schema, types
from .atomic import AtomicFile
from .inputs import CheckedInputs, InputFile
from .opening import reading
from .results import ResultFile, add_report
from .tree import open_tree
from .trial import Trial

CHECKSUMS = "checksums/json"


class GoldenError(Exception):
    """A golden that is missing, damaged, or of another version; says which file and what is wrong with it."""


@dataclass(frozen=True)
class Golden:
    """A golden in memory, every checksum verified.

    case: `cases.Case`, the problem. results: arrays by dataset name ("outputs/out", "grads/dq", ...), float32 or
    float64 from the float64 recurrence. tolerances: relative Frobenius error allowed, by the names of `compare.TIERS`.
    provenance: dict.
    """

    path: str
    case: Case
    results: dict
    tolerances: dict
    provenance: dict

    @property
    def tier(self):
        """"bf16" when any per-token input has a 16-bit type, else "tight"."""
        return tier_of(_narrowest(self.case))

    @property
    def tolerance(self):
        """What an engine's results may differ by."""
        return self.tolerances[self.tier]


def write_golden(path, case, results, provenance, force=False):
    """Write the golden of a `cases.Case`; `results` must come from the reference (`evaluation.reference`).

    provenance: dict of JSON values. Raises InputError when `path` exists and not `force`, and OSError.
    """
    arrays = {name: getattr(case, name) for name in (*schema.PER_TOKEN, *schema.PARAMETERS, *schema.STATES)}
    inputs = CheckedInputs(os.fspath(path), arrays, case.cu_seqlens, case.conv, case.options)
    tolerances = tolerances_of(_narrowest(case), case.repeated_keys, case.conv is not None)
    report = {"case": case.name, "repeated_keys": case.repeated_keys, "engine": "reference",
              "options": case.options.to_dict()}
    with AtomicFile(path, "golden", force) as file:
        with file.writing():
            inputs.put(file.root, compress=True)
            for name, x in results.items():
                types.write_rows(types.create(file.root, name, x.shape, x.dtype, compress=True), 0, x)
            for tier, tolerance in tolerances.items():
                file.root.require_group("tolerances").attrs[tier] = tolerance
            add_report(file.root, report, provenance)
            types.write_json(file.root, CHECKSUMS, _checksums(case, results, tolerances))
        file.commit()


def read_golden(path):
    """The `Golden` at `path`.

    Raises GoldenError when it is missing, no golden, truncated, damaged, edited, of another version or an older form.
    """
    golden = _read_sealed(path)
    if sorted(golden.tolerances) != sorted(TIERS):
        raise GoldenError(f"{path}: /tolerances: expected one for each of {', '.join(TIERS)}, got "
                          f"{', '.join(golden.tolerances)}: an older form, which `kda-engine golden upgrade` rewrites")
    return golden


def upgrade_golden(path):
    """Rewrite a golden of an older form in today's, inputs and results bit for bit; returns whether it needed that.

    Raises GoldenError as `read_golden` does, and OSError; then the file is as it was.
    """
    golden = _read_sealed(path)
    if sorted(golden.tolerances) == sorted(TIERS):
        return False
    write_golden(path, golden.case, golden.results, golden.provenance, force=True)
    return True


def _read_sealed(path):
    """The golden as its checksums seal it, of whatever form."""
    try:
        with (open_tree(path, ("golden",), Trial(path, "results")) as tree, ResultFile(path) as results,
              InputFile(path) as inputs):
            stated = tree.needed_group("tolerances")
            checksums = tree.needed(CHECKSUMS)
            with reading(path, "report and tolerances"):
                case = inputs.read_case(results.report["case"], results.report["repeated_keys"])
                tolerances = {name: float(value) for name, value in stated.attrs.items()}
                sealed = dict(types.read_json(checksums))
            golden = Golden(os.fspath(path), case, {name: results.read(name) for name in results.tensors()},
                            tolerances, results.provenance)
    except InputError as error:
        raise GoldenError(str(error)) from error
    found = _checksums(golden.case, golden.results, golden.tolerances)
    for name in sorted(found.keys() | sealed.keys()):
        if found.get(name) != sealed.get(name):
            raise GoldenError(f"{path}: /{name}: expected what its checksum was taken of, got something else")
    return golden


def _checksums(case, results, tolerances):
    """SHA-256 by dataset name of everything that decides a check."""
    arrays = {f"inputs/{name}": getattr(case, name) for name in (*schema.PER_TOKEN, *schema.PARAMETERS, *schema.STATES)}
    if case.conv is not None:
        for part, of in (("weight", case.conv.weights), ("bias", case.conv.biases)):
            arrays |= {f"inputs/conv/{name}_{part}": x for name, x in of.items()}
    bounds = [0, len(case.q)] if case.cu_seqlens is None else case.cu_seqlens
    arrays["inputs/cu_seqlens"] = np.asarray(bounds, np.int64)
    sums = {name: hashlib.sha256(f"{x.dtype.name} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes()).hexdigest()
            for name, x in (arrays | results).items() if x is not None}
    said = {"inputs options": [getattr(case.options, name) for name in schema.OPERATOR_OPTIONS],
            "inputs/conv activation": case.conv and case.conv.activation,
            "tolerances": sorted(tolerances.items()),
            "report": [case.name, case.repeated_keys]}
    return sums | {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in said.items()}


def _narrowest(case):
    """The type of the narrowest per-token input."""
    given = (getattr(case, name) for name in schema.PER_TOKEN)
    return min((x.dtype for x in given if x is not None), key=lambda dtype: dtype.itemsize)
