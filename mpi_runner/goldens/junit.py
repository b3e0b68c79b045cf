"""Judgements as a JUnit file, which CI systems show: a suite a golden, a test a tensor."""

import os
from xml.etree import ElementTree

from ..difference_table import place


def write_junit(path, judgements):
    """Write the file. Raises OSError."""
    root = ElementTree.Element("testsuites", name="kda-engine golden check")
    for judgement in judgements:
        failed = sum(not verdict.passed for verdict in judgement.verdicts)
        suite = ElementTree.SubElement(
            root, "testsuite", name=os.path.basename(judgement.path), failures=str(failed),
            tests=str(max(1, len(judgement.verdicts) + len(judgement.skipped))),
            skipped=str(len(judgement.skipped) + (judgement.refused is not None)),
            errors=str(int(judgement.error is not None)))
        class_name = f"golden.{judgement.case or os.path.basename(judgement.path)}"
        if judgement.error is not None:
            case = ElementTree.SubElement(suite, "testcase", classname=class_name, name="golden")
            ElementTree.SubElement(case, "error", message=judgement.error)
        if judgement.refused is not None:
            case = ElementTree.SubElement(suite, "testcase", classname=class_name, name="golden")
            ElementTree.SubElement(case, "skipped", message=judgement.refused)
        for verdict in judgement.verdicts:
            case = ElementTree.SubElement(suite, "testcase", classname=class_name, name=verdict.name)
            if not verdict.passed:
                ElementTree.SubElement(case, "failure", message=_message(verdict, judgement))
        for name in judgement.skipped:
            case = ElementTree.SubElement(suite, "testcase", classname=class_name, name=name)
            ElementTree.SubElement(case, "skipped")
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _message(verdict, judgement):
    if verdict.difference is None:
        return verdict.why
    return (f"{judgement.by}: relative error {verdict.difference.relative:.3g}, tolerance {verdict.tolerance:.3g}; "
            + place(verdict.name, verdict.difference, verdict.first_bad, judgement.cu_seqlens))
