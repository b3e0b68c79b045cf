"""Digests of what sources say to the machine: comments, docstrings and blank space do not count.

CUDA: the tokens of every file, strings whole, a preprocessor directive on a line of its own. Python: the syntax tree
without docstrings, written so that every version of Python writes it alike.
"""

import ast
import hashlib
import re

# In this order: what opens a comment or a string is no operator.
_TOKENS = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
      | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
      | (?P<text>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
      | (?P<word>[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)
      | (?P<joined>\\\n)
      | (?P<line>\n)
      | (?P<blank>[ \t\r\f\v]+)
      | (?P<operator><<=|>>=|\.\.\.|->\*|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|/=|%=|&=|\|=|\^=|\#\#|.)
    """, re.VERBOSE | re.DOTALL)


def cuda_code(text):
    """Tokens of CUDA code apart by blanks, each directive on a line of its own. Raises ValueError for what is no code."""
    found, directive, starts_line = [], False, True
    for match in _TOKENS.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind == "mark":
            kind = "raw"
        if kind == "line":
            if directive:
                found.append("\n")
            directive, starts_line = False, True
        elif kind in ("blank", "comment", "joined"):
            # In a directive it matters whether there is a blank, as in `#define f(x)`.
            if directive and found[-1] != " ":
                found.append(" ")
        else:
            if kind == "operator" and token in "\"'":
                raise ValueError(f"expected a string or character that ends, got {text[match.start():][:40]!r}")
            if token == "#" and starts_line:
                directive = True
                found.append("\n")
            starts_line = False
            found.append(token)
            if not directive:
                found.append(" ")
    return "\n".join(line.strip() for line in "".join(found).split("\n") if line.strip())


def python_code(text):
    """The syntax tree of Python code without docstrings, as text."""
    return _written(ast.parse(text))


def _written(node):
    if isinstance(node, list):
        return "[" + ",".join(map(_written, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and _is_text(node.body[:1]):
        fields["body"] = node.body[1:]
    # What is empty or a matter of parsing: versions of Python differ in which of these fields there are.
    said = {name: x for name, x in fields.items()
            if isinstance(node, ast.Constant) and name == "value"
            or name not in ("ctx", "kind", "type_comment", "type_ignores") and x is not None and x != []}
    return type(node).__name__ + "(" + ",".join(f"{name}={_written(x)}" for name, x in said.items()) + ")"


def _is_text(statements):
    return bool(statements) and isinstance(statements[0], ast.Expr) and isinstance(
        statements[0].value, ast.Constant) and isinstance(statements[0].value.value, str)


def digest(path):
    """SHA-256, in hex, of the code of one file."""
    code = python_code if path.suffix == ".py" else cuda_code
    return hashlib.sha256(code(path.read_text()).encode()).hexdigest()


def kernel_digest(file):
    """SHA-256, in hex, of the code of a kernel's file under kernels_cu and of all that it includes."""
    from kda_engine.device import sources

    total = hashlib.sha256()
    for name in sources.reachable(file):
        total.update(f"{name}\0{cuda_code((sources.ROOT / name).read_text())}\0".encode())
    return total.hexdigest()
