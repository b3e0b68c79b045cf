"""Every command line and Python snippet of README and docs works as it stands.

A page is read from top to bottom in a folder of its own with the project's files in it. Blocks of `sh` and `python` are
run. One with a comment `# needs ...` (a cluster, a GPU, the network) is only parsed, and named by the test that does
it: `pytest tests/test_docs.py -k parsed --collect-only` lists them. What needs PyTorch is run where that is installed.
`# ends with ...` gives a block's exit codes.
"""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import mpirun

from mpi_runner.__main__ import parser
from mpi_runner.job import Job

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md",
                *(ROOT / folder / "README.md" for folder in ("data", "examples", "tests")),
                *(ROOT / "docs").rglob("*.md")})
PROJECT = ("kda_engine", "mpi_runner", "kernels_cu", "examples", "docs", "LICENSE", "Makefile", "pyproject.toml")
FENCE = re.compile(r"^```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*\$?\s*(kda-engine|mpirun|srun|python3?|pip|make)\s+\S")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, first line, language and text."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def needs(self):
        """What it needs that a test does not have, or None."""
        found = re.search(r"^# needs (.+)$", self.code, re.MULTILINE)
        return found and found[1]

    @property
    def codes(self):
        """Exit codes it may end with."""
        found = re.search(r"^# ends with (.+)$", self.code, re.MULTILINE)
        return [int(word) for word in re.findall(r"\d+", found[1])] if found else [0]

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}" + (f" needs {self.needs}" if self.needs else "")


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["code"])
            for found in FENCE.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks(page)]
PARSED = [block for block in BLOCKS if block.needs]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The project's files, programs that stand for its commands, and the environment of a reader."""
    for name in PROJECT:
        os.symlink(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "data", tmp_path / "data")
    programs = tmp_path / ".programs"
    programs.mkdir()
    for name, command in {"kda-engine": f"{sys.executable} -m mpi_runner", "python": sys.executable,
                          "python3": sys.executable, "mpirun": mpirun()}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    # The packages as they lie in this folder, which is no checkout: whatever is being worked on does not stop it.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_shell(block):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], capture_output=True, text=True, timeout=300)
    assert done.returncode in block.codes, f"{block} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language in ("sh", "python") for b in blocks(page))],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_read_from_top_to_bottom(page, folder):
    names = {"__name__": "snippet"}
    for block in blocks(page):
        if block.needs and not (block.needs == "PyTorch" and importlib.util.find_spec("torch")):
            continue
        if block.language == "python":
            exec(compile(block.code, str(block), "exec"), names)
        elif block.language == "sh":
            run_shell(block)


def test_there_is_something_to_run():
    ran = [block for block in BLOCKS if block.language in ("sh", "python") and not block.needs]
    assert len(ran) >= 20 and {ROOT / "README.md", ROOT / "docs" / "tutorial.md"} <= {block.page for block in ran}


@pytest.mark.parametrize("block", PARSED, ids=str)
def test_parsed_only(block):
    if block.language == "python":
        ast.parse(block.code)
        return
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for arguments in engine_commands(block.code):
        try:
            parser().parse_args(arguments)
        except SystemExit as stop:
            assert stop.code == 0, f"{block}: kda-engine {shlex.join(arguments)}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_shell_texts_are_clean(block):
    """By shellcheck, as scripts for bash; what else they read it need not find."""
    beside = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([str(beside) if beside.exists() else "shellcheck", "--shell=bash", "--exclude=SC1091",
                              "-"], input=block.code,
                             capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def engine_commands(code):
    """The arguments of every `kda-engine` in a shell text."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "kda-engine" in words:
            after = words[words.index("kda-engine") + 1 :]
            ends = [i for i, word in enumerate(after) if word in ("&", "|", "||", "&&", ";", ">")]
            yield after[: ends[0]] if ends else after


def test_the_parser_sees_wrong_commands():
    assert list(engine_commands("srun -n 2 kda-engine run a b --backward &\nkda-engine info")) == [
        ["run", "a", "b", "--backward"], ["info"]]
    with pytest.raises(SystemExit):
        parser().parse_args(["run", "a"])


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language not in ("sh", "python")], ids=str)
def test_other_blocks(block):
    if block.language == "toml":
        options = {name.replace("-", "_"): value for name, value in tomllib.loads(block.code).items()}
        Job.resolve({"input": "a.h5", "output": "b.h5", **options}, None)
    elif block.language == "dockerfile":
        known = ("FROM", "COPY", "RUN", "ENTRYPOINT")
        assert all(line.split()[0] in known for line in block.code.splitlines()), block
    else:
        # A command in a block that is not run would be a command that nobody has tried.
        commands = [line for line in block.code.splitlines() if COMMAND.match(line)]
        assert block.language in ("", "text") and not commands, f"{block}: {commands}: expected a block marked sh"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("script, page", [("decomposition", "decomposition"), ("glance", "glance")])
def test_the_pictures_of_a_page_are_those_of_its_script(script, page, folder):
    pytest.importorskip("matplotlib")
    drawn = folder / "pictures"
    drawn.mkdir()
    subprocess.run([sys.executable, f"docs/figures/{script}.py", drawn], check=True, timeout=120)
    shown = set(re.findall(r"\(figures/([^)]+)\)", (ROOT / "docs" / f"{page}.md").read_text()))
    assert {path.name for path in drawn.iterdir()} == shown and len(shown) >= 3
    for name in shown:
        assert (drawn / name).stat().st_size > 5000
        assert (ROOT / "docs" / "figures" / name).stat().st_size < 60_000


def test_every_picture_is_shown():
    pages = "".join(page.read_text() for page in PAGES)
    assert all(f"figures/{path.name}" in pages for path in (ROOT / "docs" / "figures").glob("*.svg"))


def test_snippets_print_what_the_page_shows(folder, capsys):
    page, names, compared = ROOT / "docs" / "decomposition.md", {}, []
    block, *rest = [block for block in blocks(page) if block.language in ("python", "")]
    for after in [*rest, None]:
        if block.language == "python":
            exec(compile(block.code, str(block), "exec"), names)
            shown = capsys.readouterr().out
            if after is not None and after.language == "":
                assert shown == after.code, str(block)
                compared.append(shown)
        block = after
    # The worked example: forward from state 0, backward from gradient 1, by scans and by the engine.
    assert compared[1:] == ["[2.0, 1.8, 3.54]\n[0.75, 0.9, 1.0]\n", "3.54 0.75\n"]


def test_the_page_on_tests_names_files_that_are_there():
    text = (ROOT / "tests" / "README.md").read_text()
    named = set(re.findall(r"`(test_\w+\.py)`", text))
    assert len(named) > 50 and named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
