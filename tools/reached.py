"""Record which tests reach which mutants; `tools.mutants reach` runs this at the start of every process."""

import ast
import builtins
import json
import os
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType

MARKED: dict[str, list[tuple[int, int]]] = {}
with open(os.environ["MUTANTS"], encoding="utf-8") as drawn:
    for one in json.load(drawn):
        MARKED.setdefault(one["path"], []).append((one["line"], one["number"]))
SEEN: set[tuple[int, str]] = set()
ORIGINAL = SourceFileLoader.get_code


def reached(number: int) -> None:
    """Record that the running test reaches a mutant, in any process."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "import").rpartition(" (")[0] or "import"
    if (number, test) not in SEEN:
        SEEN.add((number, test))
        file = os.open(os.environ["REACHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{number} {test}\n".encode())
        os.close(file)


def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
    """Compile files with a call before each mutant's statement, including copies of the files in model folders."""
    travelled = "/transformers_modules/" in self.path and f"plain_vit/{os.path.basename(self.path)}"
    marks = next((marks for path, marks in MARKED.items() if self.path.endswith("/" + path) or path == travelled), None)
    if marks is None:
        return ORIGINAL(self, name)
    tree = ast.parse(self.get_data(self.path))
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [each for one in statements for each in (*calls(one, marks), one)])
    return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


def calls(statement: ast.AST, marks: list[tuple[int, int]]) -> Iterator[ast.stmt]:
    """Yield the calls that belong before a statement."""
    for line, number in marks:
        if isinstance(statement, ast.stmt) and statement.lineno == line:
            call = ast.parse(f"__import__('builtins').reached_mutant({number})").body[0]
            yield ast.copy_location(call, statement)


builtins.reached_mutant = reached  # type: ignore[attr-defined]
SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
