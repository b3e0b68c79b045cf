"""What the GPU record and the resource report are digests of: what is said to the machine, and all of it."""

import shutil

import pytest
from code_digest import cuda_code, kernel_digest, python_code

pytest.importorskip("cupy")

import gpu_record  # noqa: E402

from kda_engine.device import sources  # noqa: E402
from kda_engine.device.kernels import KERNELS  # noqa: E402

CODE = '''#include "a.cuh"
#define F(x) ((x) + 1)
__device__ int f(const char* s) { return s[0] == '"' ? F(2) : 1'000 - -3; }  // f
'''

ALIKE = (
    CODE.replace("  // f", ""), CODE.replace("// f", "/* g \n // */"), CODE.replace("int f", "int\n\n  f"),
    CODE.replace("((x) + 1)", "((x) \\\n + 1)"), CODE.replace('"a.cuh"', '"a.cuh"  // why'),
    "// what this is: \"#define\"\n\n" + CODE, CODE.replace("{ return", "{// it's so\nreturn"),
)
OTHER = (
    CODE.replace("+ 1)", "+ 2)"), CODE.replace("F(x)", "F (x)"), CODE.replace("a.cuh", "b.cuh"),
    CODE.replace("int f", "intf"), CODE.replace("- -3", "--3"), CODE.replace("'\"'", "' '"), CODE.replace("1'000", "1'001"),
    CODE.replace("#define", "//#define"), CODE.replace("  // f", "\n#define G").replace("1'000", "1'000 //"),
    CODE.replace("const char*", "char*"),
)


@pytest.mark.parametrize("text", ALIKE)
def test_comments_and_blanks_of_cuda_code_do_not_count(text):
    assert text != CODE and cuda_code(text) == cuda_code(CODE)


@pytest.mark.parametrize("text", OTHER)
def test_everything_else_does(text):
    assert cuda_code(text) != cuda_code(CODE)


def test_what_looks_like_a_comment_in_a_string_counts():
    for first, second in (('"a // b"', '"a // c"'), ('"/* a */"', '"/* b */"'), ('R"x(// a")x"', 'R"x(// b")x"'),
                          (r'"\" // a"', r'"\" // b"')):
        assert cuda_code(f"f({first});") != cuda_code(f"f({second});")
    assert cuda_code('a(); // "') == "a ( ) ;"


@pytest.mark.parametrize("text", ('f("a);\n', "f('a);\n"))
def test_a_string_without_an_end_is_refused(text):
    with pytest.raises(ValueError, match="that ends"):
        cuda_code(text)


def test_docstrings_comments_and_layout_of_python_code_do_not_count():
    code = 'def f(x, *, y=1):\n    "f"\n    return {**x, "a": [1, None]}\n'
    alike = '"""module"""\n\ndef f(x, *, y = 1):  # f\n\n    """g"""\n    return {**x,\n     "a": [1, None]}'
    assert python_code(code) == python_code(alike)
    others = (code.replace("y=1", "y=2"), code.replace("y=1", "y=None"), code.replace("y=1", "y"),
              code.replace("None", "0"), code.replace("**x", "x: x"), code.replace("return {", 'return "f", {'),
              code.replace('"a"', '"b"'), code.replace("*, y", "y"))
    for other in others:
        assert python_code(other) != python_code(code)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the recorded sources, where the record looks for them."""
    for folder in ("kernels_cu", "kda_engine"):
        shutil.copytree(gpu_record.ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "ROOT", tmp_path / "kernels_cu")
    return tmp_path


def changed(tree, path, old, new):
    """Files whose recorded digest changes, and kernels whose digest in the resource report does, by an edit."""
    files, kernels = gpu_record.digests(), {name: kernel_digest(kernel.file) for name, kernel in KERNELS.items()}
    file = tree / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    now = gpu_record.digests()
    return ([name for name in files if files[name] != now[name]],
            [name for name in kernels if kernels[name] != kernel_digest(KERNELS[name].file)])


def test_a_comment_in_a_kernel_leaves_the_record_as_it_is(tree):
    assert changed(tree, "kernels_cu/kernels/prepare.cu", "//", "// Said otherwise.\n//") == ([], [])


def test_a_constant_in_a_kernel_does_not(tree):
    files, kernels = changed(tree, "kernels_cu/kernels/prepare.cu", "constexpr int kThreads = ", "constexpr int kThreads = 1 + ")
    assert files == ["kernels_cu/kernels/prepare.cu"] and kernels == ["prepare"]


def test_a_docstring_in_the_engine_leaves_the_record_as_it_is(tree):
    assert changed(tree, "kda_engine/device/launch.py", '"""The one way', '"""One way') == ([], [])


def test_a_constant_in_the_engine_does_not(tree):
    assert changed(tree, "kda_engine/device/launch.py", "2**31", "2**30") == (["kda_engine/device/launch.py"], [])


def test_no_source_asks_for_its_line():
    """Else blank lines would count."""
    for path in sources.ROOT.rglob("*.cu*"):
        assert "__LINE__" not in cuda_code(path.read_text()), path
