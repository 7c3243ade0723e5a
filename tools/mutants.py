"""Mutation testing: draw small random changes of the code, and find out which tests notice them.

    python -m tools.mutants draw --seed 1  # writes tools/mutants.json
    python -m tools.mutants reach          # finds the tests that reach each changed statement, and their durations
    python -m tools.mutants kill           # runs these tests with one change at a time; resumes where it stopped
    python -m tools.mutants kill --slow    # for survivors, runs slow tests of the same files for ten minutes
    python -m tools.mutants table          # prints the results

The tests of a mutant run file by file, the quickest file first, until one fails. Files are left out once the total time
exceeds `--seconds`.

The changes are those of mutation testing (DeMillo, Lipton and Sayward 1978; the operators of mutmut): other constants,
comparisons and operators, negated conditions, omitted calls, swapped arguments. Each part of the package gets mutants
in proportion to its lines, and at least three. Run it in a separate clone with its own installation: `kill` changes
files, one at a time, and restores them.
"""

import argparse
import ast
import collections
import copy
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
REACHED = ROOT / "reached.txt"
DURATIONS = ROOT / "reached.xml"
IMPORTED = "import"  # instead of a test's name: the statement runs when its file is imported
JOBS = 2
LONGEST = 1200  # limit for the tests of one mutant, in seconds
SLOW = 600  # limit for its slow tests, in seconds
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(JOBS)]
# Parts of the package by path prefix; the first match counts.
PARTS = {
    "image processing": ("plain_vit/image_",),
    "conversion": ("plain_vit/conversion/",),
    "training": ("plain_vit/training/",),
    "files": ("plain_vit/files/", "plain_vit/system/calls.py"),
    "hub": ("plain_vit/hub/", "plain_vit/hub/card.py", "plain_vit/hub/licenses.py", "plain_vit/hub/markdown.py"),
    "analysis": ("plain_vit/analysis/", "plain_vit/browse/"),
    "model": ("plain_vit/",),
}
TABLES = ("__init__.py",)  # contain only names
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass
class Mutant:
    """A small change of the code.

    Attributes:
        number: Number of the mutant.
        part: Part of the package.
        path: Path of the file.
        line: Line of the changed statement, from 1.
        operator: Kind of change.
        before: Original expression or statement.
        after: Its replacement.
        span: Line and column of the beginning and the end, as `ast` counts them.
        reached_by: Tests that reach the statement, or `IMPORTED`.
        killed_by: The first test that failed, or None.
        tests: Number of tests that were run or selected.
        seconds: Duration of the tests; None if they have not run yet.
        slow: The first slow test that failed, "none" if none did, or None if they have not run.
    """

    number: int
    part: str
    path: str
    line: int
    operator: str
    before: str
    after: str
    span: tuple[int, int, int, int]
    reached_by: list[str] = field(default_factory=list)
    killed_by: str | None = None
    tests: int = 0
    seconds: float | None = None
    slow: str | None = None

    def applied(self, text: str) -> str:
        """Return the text of the file with the change."""
        first, start, last, end = self.span
        lines = text.encode().splitlines(keepends=True)  # columns are counted in bytes
        middle = lines[first - 1][:start] + self.after.encode() + lines[last - 1][end:]
        return b"".join([*lines[: first - 1], middle, *lines[last:]]).decode()


# ---- drawing ----


def changes(tree: ast.Module) -> Iterator[tuple[int, str, ast.AST, str]]:
    """Yield each possible change of a file: line of the statement, operator, node and new text."""
    for statement, node in _computed(tree):
        for operator, changed in _changed(node):
            yield statement.lineno, operator, node, ast.unparse(ast.fix_missing_locations(changed))


def _computed(tree: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Yield nodes that compute with their statements, excluding annotations, docstrings, imports and error messages."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            inside = node if isinstance(node, ast.stmt) else statement
            if inside is not None:
                yield inside, node
            yield from _computed(node, inside)


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the possible changes of one node."""
    new: Any = copy.deepcopy(node)
    match node:
        case ast.Constant(value=bool()):
            yield "truth", ast.Constant(not node.value)
        case ast.Constant(value=int() | float() as value):
            yield "number", ast.Constant(value + 1)
        case ast.Constant(value=str(value)) if value:
            yield "text", ast.Constant(f"XX{value}XX")
        case ast.Compare(ops=[one]) if type(one) in COMPARISONS:
            new.ops = [COMPARISONS[type(one)]()]
            yield "comparison", new
        case ast.BinOp() if type(node.op) in OPERATORS:
            new.op = OPERATORS[type(node.op)]()
            yield "operator", new
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "operator", new
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "operator", new.operand
        case ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "condition", new
        case ast.Expr(value=ast.Call()):
            yield "dropped call", ast.Pass()
        case ast.Call(args=[_, _, *_]) if not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            new.args[:2] = new.args[1::-1]
            yield "swapped arguments", new
        case ast.Return(value=ast.AST()) if not isinstance(node.value, ast.Constant):
            yield "dropped result", ast.Return(ast.Constant(None))


def part_of(path: Path) -> str:
    """Return the part of the package that a file belongs to."""
    name = path.relative_to(ROOT).as_posix()
    return next(part for part, starts in PARTS.items() if name.startswith(starts))


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw changes: part and file in proportion to their lines, kind and location uniformly."""
    chance, drawn = random.Random(seed), list[Mutant]()
    files = [path for path in sorted((ROOT / "plain_vit").rglob("*.py")) if path.name not in TABLES]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    for part, wanted in shares(lines, count).items():
        own = [path for path in files if part_of(path) == part]
        for number in range(len(drawn), len(drawn) + wanted):
            found = list[tuple[int, str, Any, str]]()
            while not found:  # a file with only names has no possible changes
                [path] = chance.choices(own, [lines[one] for one in own])
                text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
                found = list(changes(ast.parse(text)))
            kind = chance.choice(sorted({operator for _, operator, _, _ in found}))
            line, operator, node, after = chance.choice([one for one in found if one[1] == kind])
            span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            before = ast.get_source_segment(text, node) or ""
            drawn.append(Mutant(number, part, name, line, operator, before, after, span))
            compile(drawn[-1].applied(text), name, "exec")
    return drawn


def shares(lines: Mapping[Path, int], count: int) -> dict[str, int]:
    """Return the number of changes of each part."""
    of_part = {part: sum(number for path, number in lines.items() if part_of(path) == part) for part in PARTS}
    shared = {part: max(3, round(count * of_part[part] / sum(of_part.values()))) for part in PARTS}
    largest = max(shared, key=lambda part: shared[part])
    return {**shared, largest: shared[largest] + count - sum(shared.values())}


# ---- which tests reach them ----


def reach(file: Path, marks: str) -> None:
    """Run the tests with marked statements, and record which tests reach each mutant, in any process."""
    hook, mark = Path(sysconfig.get_paths()["purelib"]) / "reached_mutants.pth", ROOT / "tools" / "reached.py"
    hook.write_text(f"import os; 'MUTANTS' in os.environ and exec(open({str(mark)!r}).read(), {{}})\n")
    REACHED.unlink(missing_ok=True)
    environment = {**os.environ, "MUTANTS": str(file), "REACHED": str(REACHED)}
    report = [f"--junitxml={DURATIONS}", "-o", "junit_family=xunit1"]
    try:
        subprocess.run([*PYTEST, "-m", marks, *report], cwd=ROOT, env=environment, check=False)
    finally:
        hook.unlink()
    mutants = load(file)
    for number, test in (line.split(" ", 1) for line in sorted(set(REACHED.read_text(encoding="utf-8").splitlines()))):
        if test not in mutants[int(number)].reached_by:
            mutants[int(number)].reached_by.append(test)
    save(file, mutants)


def durations() -> dict[str, float]:
    """Return the seconds that each test took in the run of all tests."""
    cases = [case.attrib for case in ElementTree.parse(DURATIONS).iter("testcase")]
    # A module that is skipped as a whole has a case without a file.
    return {f"{case['file']}::{case['name']}": float(case["time"]) for case in cases if "file" in case}


# ---- which tests notice ----


def kill(file: Path, numbers: range, marks: str, seconds: int, slow: bool) -> None:
    """Apply each mutant and run its tests until one fails; mutants that were tried already are skipped."""
    if subprocess.run(["git", "diff", "--quiet", "plain_vit"], cwd=ROOT, check=False).returncode:
        sys.exit("plain_vit/ has changes that are not committed: run this in a clone of its own")
    known = durations()
    for number in numbers:
        mutant = load(file)[number]
        survived = mutant.seconds is not None and mutant.killed_by is None
        if not (survived and mutant.slow is None if slow else mutant.seconds is None):
            continue
        path = ROOT / mutant.path
        text = path.read_text(encoding="utf-8")
        begin = time.monotonic()
        try:
            path.write_text(mutant.applied(text), encoding="utf-8")
            if slow:
                mutant.slow = run_slow(mutant) or "none"
            else:
                chosen, expected = choose(mutant, known, seconds)
                mutant.killed_by = run(chosen, marks, 300 + 3 * expected) if chosen else None
                mutant.tests, mutant.seconds = len(chosen), time.monotonic() - begin
        finally:
            path.write_text(text, encoding="utf-8")
        save(file, {**load(file), number: mutant})
        noticed = mutant.slow if slow else mutant.killed_by or "survived"
        print(number, mutant.path, mutant.line, noticed, f"{time.monotonic() - begin:.0f} s", flush=True)


def choose(mutant: Mutant, known: dict[str, float], seconds: int) -> tuple[list[str], float]:
    """Return the tests that reach a mutant, quickest file first, and their duration; all tests if it runs on import."""
    files = collections.defaultdict[str, list[str]](list)
    for test in known if IMPORTED in mutant.reached_by else mutant.reached_by:
        files[test.partition("::")[0]].append(test)
    chosen, total = list[str](), 0.0
    for tests in sorted(files.values(), key=lambda tests: sum(known.get(test, 0) for test in tests)):
        own = sum(known.get(test, 0) for test in tests) / JOBS
        if total + own < seconds:
            chosen, total = [*chosen, *tests], total + own
    return chosen, total


def run(chosen: list[str], marks: str, limit: float) -> str | None:
    """Run tests until one fails, also when run alone, and return its name; a timeout counts as a failure."""
    list_of = ROOT / "chosen.txt"
    try:
        while chosen:
            list_of.write_text("\n".join(chosen), encoding="utf-8")
            files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
            failed = first_failure([*files, "-p", "tools.mutants", "-m", marks], limit, CHOSEN=str(list_of))
            if failed is None or failed not in chosen or first_failure([failed, "-m", marks], limit):
                return failed
            chosen = [test for test in chosen if test != failed]  # it failed only because of other tests
    except subprocess.TimeoutExpired:
        return f"no end within {limit:.0f} s"
    finally:
        list_of.unlink()
    return None


def run_slow(mutant: Mutant) -> str | None:
    """Run the slow tests in the files whose other tests reach a mutant, as many as time allows."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in mutant.reached_by if test != IMPORTED))
    try:
        return first_failure([*files, "-m", "slow"], SLOW) if files or IMPORTED in mutant.reached_by else None
    except subprocess.TimeoutExpired:
        return None


def first_failure(words: list[str], limit: float, **environment: str) -> str | None:
    """Run pytest until a test fails, and return its name."""
    process = subprocess.Popen(
        [*PYTEST, "-x", "-rfE", "--tb=no", *words], cwd=ROOT, start_new_session=True,
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including its child processes
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if process.returncode in (0, 5):  # 5: there was no test
        return None
    if process.returncode == 4:
        sys.exit(f"pytest does not know these arguments: {printed}")
    return failed[0].split(" ", 1)[1].partition(" - ")[0] if failed else f"exit {process.returncode}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests, with their files in the chosen order."""
    chosen = Path(os.environ["CHOSEN"]).read_text(encoding="utf-8").split("\n")
    files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
    kept = [item for item in items if item.nodeid in set(chosen)]
    items[:] = sorted(kept, key=lambda item: files.index(item.nodeid.partition("::")[0]))


# ---- results ----


def load(file: Path) -> dict[int, Mutant]:
    """Read the mutants from a file."""
    return {one["number"]: Mutant(**one) for one in json.loads(file.read_text(encoding="utf-8"))}


def save(file: Path, mutants: dict[int, Mutant]) -> None:
    """Write the mutants to a file."""
    found = [asdict(mutants[number]) for number in sorted(mutants)]
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def table(file: Path) -> None:
    """Print a row for each mutant."""
    print("| | part | where | change | tests that reach it | killed by |\n|---:|---|---|---|---:|---|")
    for one in load(file).values():
        before, after = (" ".join(text.split())[:60].replace("|", "\\|") for text in (one.before, one.after))
        killed = one.killed_by or one.slow or ("not tried" if one.seconds is None else "none")
        many = "on import" if IMPORTED in one.reached_by else len(one.reached_by)
        where = f"{one.path.removeprefix('plain_vit/')}:{one.line}"
        print(f"| {one.number} | {one.part} | {where} | `{before}` to `{after}` | {many} | {killed} |")


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["draw", "reach", "kill", "table"])
    parser.add_argument("--file", type=Path, default=ROOT / "tools" / "mutants.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--marks", default="not slow", help="an expression of pytest's -m; '' for all tests")
    parser.add_argument("--numbers", type=int, nargs=2, default=(0, 40), help="of `kill`: from, and before")
    parser.add_argument("--seconds", type=int, default=LONGEST, help="of `kill`: of tests of one mutant")
    parser.add_argument(
        "--slow", action="store_true", help="of `kill`: the slow tests, where the others killed nothing"
    )
    options = parser.parse_args()
    if options.step == "draw":
        save(options.file, {one.number: one for one in draw(options.seed, options.count)})
    elif options.step == "reach":
        reach(options.file.absolute(), options.marks)
    elif options.step == "kill":
        kill(options.file, range(*options.numbers), options.marks, options.seconds, options.slow)
    table(options.file)


if __name__ == "__main__":
    main()
