"""Judgements in words and as JSON."""

from .. import difference_table
from ..colour import paint


def as_line(judgement):
    """A golden that passes, beside others: the tensor with the largest error."""
    worst = max(judgement.verdicts, key=lambda verdict: verdict.difference.relative)
    return (f"{judgement.path}: {judgement.case}, {judgement.by}, tier {judgement.tier}: {len(judgement.verdicts)} "
            f"tensors, largest error {worst.difference.relative:.2e} of {worst.tolerance:.0e} ({worst.name})  "
            + paint("ok", "green"))


def as_refusal(judgement):
    """A golden that the engine cannot compute."""
    return f"{judgement.path}: {judgement.case}, {judgement.by}: not compared: {judgement.refused}"


def as_table(judgement):
    """A golden, tensor by tensor."""
    head = f"{judgement.path}: {judgement.case}, {judgement.by}, tier {judgement.tier}"
    lines = [head, table(judgement)]
    if judgement.skipped:
        lines.append(f"{judgement.by} holds no gradients; {len(judgement.skipped)} of the golden's were not looked at")
    return "\n".join(lines) + "\n"


def table(judgement):
    """The tensors of a judgement as a table, without a line about whose they are."""
    return difference_table.render([
        difference_table.failure_row(v.name, v.why) if v.difference is None
        else difference_table.table_row(v.name, v.difference, v.tolerance, judgement.cu_seqlens, v.first_bad)
        for v in judgement.verdicts])


def tensors(judgement):
    """The tensors of a judgement as JSON values."""
    return [{"tensor": v.name, "why": v.why, "pass": False} if v.difference is None
            else difference_table.as_json(v.name, v.difference, v.tolerance, judgement.cu_seqlens, v.first_bad)
            for v in judgement.verdicts]


def as_json(judgement):
    """The same as JSON values."""
    if judgement.error is not None:
        return {"file": judgement.path, "error": judgement.error}
    if judgement.refused is not None:
        return {"file": judgement.path, "case": judgement.case, "by": judgement.by, "refused": judgement.refused}
    return {"file": judgement.path, "case": judgement.case, "by": judgement.by, "tier": judgement.tier,
            "pass": judgement.passed, "skipped": list(judgement.skipped), "tensors": tensors(judgement)}
