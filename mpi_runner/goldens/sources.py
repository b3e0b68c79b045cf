"""Where the results come from that a golden is to judge: an engine in this process, an engine over ranks, a file."""

import os
import tempfile

from kda_engine import layout
from kda_engine.engines import make_engine
from kda_engine.errors import InputError
from kda_engine.evaluation import evaluate
from kda_engine.hdf5.golden import GoldenError, read_golden
from kda_engine.hdf5.manifest import check_listed
from kda_engine.hdf5.results import ResultFile

from .judging import Judgement, Verdict, judge


def read_listed(path):
    """The `Golden` at `path`, which is also the one its folder's manifest lists. Raises GoldenError."""
    check_listed(path)
    return read_golden(path)


def refusal_of(engine, golden):
    """Why the engine of that name cannot compute a golden's case; None where it can. Raises InputError where the engine
    cannot be used at all.
    """
    case = golden.case
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate, case.initial_state)
    computer = make_engine(engine)
    try:
        computer.check(operands, case.options)
    except InputError as error:
        return str(error)
    return None


class OneProcess:
    """An engine here, through the public calls."""

    def __init__(self, engine):
        self._engine, self._by = engine, f"engine {engine}"

    def judge(self, path, tier):
        """The `Judgement` of the golden at `path`."""
        return _judge_if_readable(path, self._by, lambda golden: self._judge(golden, tier))

    def _judge(self, golden, tier):
        refused = refusal_of(self._engine, golden)
        if refused is not None:
            return Judgement(golden.path, self._by, golden.case.name, refused=refused)
        return judge(golden, evaluate(golden.case, self._engine), self._by, tier)


class File:
    """An output file made elsewhere. Raises InputError when it cannot be read."""

    def __init__(self, path):
        with ResultFile(path) as file:
            self._path = path
            self._results = {name: file.read(name) for name in file.tensors() if not name.startswith("boundary/")}

    def judge(self, path, tier):
        """The `Judgement` of the golden at `path`."""
        return _judge_if_readable(path, self._path, lambda golden: judge(golden, self._results, self._path, tier,
                                                                         forward_will_do=True))


class Files:
    """A folder of output files made elsewhere: NAME.h5 is judged by the golden NAME.h5. Raises InputError when it is no
    folder.
    """

    def __init__(self, folder):
        if not os.path.isdir(folder):
            raise InputError(f"--outputs: expected a folder, got {folder}")
        self._folder = folder

    def refuse_unjudged(self, goldens):
        """Raises InputError when an output has no golden among `goldens` (paths): it would go unseen."""
        outputs = {name for name in os.listdir(self._folder) if name.endswith(".h5")}
        lost = sorted(outputs - {os.path.basename(path) for path in goldens})
        if lost:
            raise InputError(f"{os.path.join(self._folder, lost[0])}: expected the name of a golden to judge it by, "
                             f"got none of that name among {len(goldens)} goldens")

    def judge(self, path, tier):
        """The `Judgement` of the golden at `path`; an output that cannot be read fails."""
        output = os.path.join(self._folder, os.path.basename(path))
        if not os.path.lexists(output):
            return _judge_if_readable(path, output, lambda golden: Judgement(
                golden.path, output, golden.case.name, refused="there is no such file"))
        try:
            return File(output).judge(path, tier)
        except InputError as error:
            return Judgement(path, output, verdicts=(Verdict("all tensors", None, 0.0, str(error)),))


class Ranks:
    """The main job over all ranks of a `Session`, with the golden for its input. `judge` is collective."""

    def __init__(self, session, engine):
        self._session, self._engine = session, engine
        self._by = f"engine {engine} on {session.size} ranks"

    def judge(self, path, tier):
        """The `Judgement` of the golden at `path` on rank 0, None elsewhere."""
        golden, unused = self._session.together(lambda: self._read(path))
        unused = self._session.control.collect(unused, "reading the golden")[0]
        if unused is not None:
            return unused if self._session.rank == 0 else None
        # The output goes through rank 0, so a folder of its own node is enough.
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "output.h5")
            self._run(path, output, golden is not None and golden.case.d_out is not None)
            if golden is None:
                return None
            with ResultFile(output) as file:
                return judge(golden, {name: file.read(name) for name in file.tensors()}, self._by, tier)

    def _read(self, path):
        """On rank 0: the `Golden`, and the Judgement where there is nothing to run; twice None elsewhere."""
        if self._session.rank:
            return None, None
        try:
            golden = read_listed(path)
        except GoldenError as error:
            return None, Judgement(path, self._by, error=str(error))
        refused = refusal_of(self._engine, golden)
        unused = None if refused is None else Judgement(path, self._by, golden.case.name, refused=refused)
        return golden, unused

    def _run(self, path, output, backward):
        from ..job import Job
        from ..main_job import run_job

        backward = self._session.control.collect(backward, "agreeing on the backward")[0]
        run_job(self._session, Job.resolve({"input": path, "output": output, "backward": backward,
                                            "engine": self._engine}, None))


def _judge_if_readable(path, by, judge_it):
    try:
        return judge_it(read_listed(path))
    except GoldenError as error:
        return Judgement(path, by, error=str(error))
