"""The repository itself: pins agree, imports go downward, notebooks are clean, and the README says only what runs."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import dlab
from dlab import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]

# ------------------------------------------------------------------------------------------ the pins


def pins(requirements: list[str]) -> dict[str, str]:
    """The exact versions in a list of requirements, by name."""
    exact = {}
    for requirement in map(Requirement, requirements):
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                exact[requirement.name] = specifier.version
    return exact


def conda_environment() -> tuple[dict[str, str], list[str]]:
    """`environment.yml` as what comes from conda, by name, and the lines that pip gets."""
    content = yaml.safe_load((TOP / "environment.yml").read_text())["dependencies"]
    (by_pip,) = (entry["pip"] for entry in content if isinstance(entry, dict))
    by_conda = dict((entry + " ").split(" ", 1) for entry in content if isinstance(entry, str))
    return by_conda, by_pip


def test_the_pins_are_the_two_that_belong_together():
    assert pins(PROJECT["dependencies"]) == {"torch": "2.13.0", "torchvision": "0.28.0"}


def test_environment_yml_has_the_pins_of_pyproject():
    _, by_pip = conda_environment()
    assert pins([line for line in by_pip if not line.startswith("-")]) == pins(PROJECT["dependencies"])


def test_environment_yml_installs_the_project_with_everything():
    by_conda, by_pip = conda_environment()
    assert "-e .[dev]" in by_pip
    assert "dlab[test]" in PROJECT["optional-dependencies"]["dev"]
    assert SpecifierSet(by_conda["python"]) == SpecifierSet(PROJECT["requires-python"])
    assert "pip" in by_conda, "conda warns, and may take another pip, where it is not named"


def test_one_version_and_one_licence():
    assert dlab.__version__ == PROJECT["version"]
    assert f"\n## {PROJECT['version']}" in (TOP / "CHANGELOG.md").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    licence = (TOP / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


# ------------------------------------------------------------------------------------ the top level

TOP_LEVEL = {
    *("notebooks", "dlab", "data", "tests", "environment.yml", "README.md"),  # what a reader sees
    *("pyproject.toml", "Makefile", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", ".ci"),  # what tools need
    *(".gitignore", ".pre-commit-config.yaml"),
}


def test_nothing_else_is_at_the_top():
    if not (TOP / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=True).stdout.split("\0")
    there = {name.split("/")[0] for name in listed if name and (TOP / name).exists()}
    assert there <= TOP_LEVEL, f"{sorted(there - TOP_LEVEL)} at the top level: it has a better place, or add it above"
    assert {"notebooks", "dlab", "data", "tests", "environment.yml", "README.md"} <= there


# ---------------------------------------------------------------------------------------- the layers


def drawn_layers() -> list[list[str]]:
    """The drawing in CONTRIBUTING.md, from the ground up: a module imports from the lines below its own."""
    text = (TOP / "CONTRIBUTING.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    drawn = [line.strip().split("  ")[0].split(", ") for line in text.splitlines() if line.startswith("    ")]
    return drawn[::-1]


LEVEL = {name: level for level, names in enumerate(drawn_layers()) for name in names}
# Draws events and knows nothing of processes; only `dlab/__init__.py`, which joins everything, imports it, and the
# bench, which measures it.
VIEWS, PLAIN = "views", {"charts", "data", "events", "kinds", "models"}
# These use dlab the way anybody does, so that they may also say `import dlab`.
USERS = {"demo", "bench", "cli"}
# They join the parts and are joined by nobody.
EXEMPT = {"__init__", "__main__"}


def dlab_imports(source: str, module: str, is_package: bool, names: set[str]) -> Iterator[str]:
    """The first components of what a module takes from dlab, wherever in it; "" is the package `dlab` itself."""
    for node in ast.walk(ast.parse(source)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if is_package else -1]
            base = [*parents[: len(parents) - node.level + 1]] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{origin}.{a.name}" if origin == "dlab" and a.name in names else origin for a in node.names]
        for target in targets:
            first, *rest = target.split(".")
            if first == "dlab":
                yield rest[0] if rest else ""


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module such as `dlab.data.files`, one sentence each."""
    own = module.split(".")[1]
    if own not in LEVEL:
        return [f"dlab/{own} is in no layer: draw it in CONTRIBUTING.md"]
    problems = []
    for name in dlab_imports(source, module, is_package, set(LEVEL)):
        if name == own or (name == "" and own in USERS) or (name, own) == (VIEWS, "bench"):
            continue
        if name == "":
            problems.append(f"{module} imports dlab itself, which joins everything: import from the module that has it")
        elif name not in LEVEL:
            problems.append(f"{module} imports {name}, which is in no layer: draw it in CONTRIBUTING.md")
        elif name == VIEWS:
            problems.append(f"{module} imports views, which nothing below dlab/__init__.py may know")
        elif own == VIEWS and name not in PLAIN:
            problems.append(f"{module} imports {name}: a view draws events and knows only plain things")
        elif LEVEL[name] >= LEVEL[own]:
            problems.append(f"{module} imports {name}, which is not below it")
    return problems


def test_every_module_is_drawn_once_and_every_name_is_a_module():
    drawn = [name for layer in drawn_layers() for name in layer]
    paths = (TOP / "dlab").iterdir()
    modules = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()} - EXEMPT
    assert sorted(drawn) == sorted(modules)
    assert all(layer == sorted(layer) for layer in drawn_layers())
    assert len(drawn_layers()) < 12


MODULES = sorted(path.relative_to(TOP) for path in (TOP / "dlab").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_go_downward_only(path):
    module = path.with_suffix("").as_posix().replace("/", ".")
    if module.split(".")[1] in EXEMPT:
        return
    is_package = path.name == "__init__.py"
    assert upward_imports((TOP / path).read_text(), module.removesuffix(".__init__"), is_package) == []


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("dlab.events", "from dlab.processes import Cluster", "not below"),
        ("dlab.events", "import dlab.data", "not below"),  # the same layer is not below either
        ("dlab.memory.ring", "from dlab.events import Event", "not below"),
        ("dlab.transports.shared", "from dlab.events import Event", "not below"),
        ("dlab.data.files", "from ..processes.cluster import Cluster", "not below"),
        ("dlab.data.files", "from .. import processes", "not below"),
        ("dlab.collectives", "def f():\n    from dlab import strategies", "not below"),  # late imports count
        ("dlab.processes.parent.run", "from dlab.views import panel", "views"),
        ("dlab.cli", "from dlab import views", "views"),
        ("dlab.views.panel", "from dlab.processes import Run", "plain things"),
        ("dlab.views.panel", "from dlab.memory.ring import Ring", "plain things"),  # below, but not for drawing
        ("dlab.processes.parent.run", "import dlab", "dlab itself"),
        ("dlab.processes.parent.run", "from dlab import Cluster", "dlab itself"),
        ("dlab.processes.parent.run", "from dlab.fancy import thing", "draw it in CONTRIBUTING"),
        ("dlab.fancy.things", "import os", "draw it in CONTRIBUTING"),
    ],
)
def test_an_upward_import_is_found(module, source, problem):
    (found,) = upward_imports(source, module)
    assert problem in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "dlab.processes.parent.run",
            "import os, torch\nfrom dlab.events import Event\nfrom dlab.processes.between.messages import send",
        ),
        ("dlab.processes.parent.run", "from . import messages\nfrom .messages import send\nfrom ..events import Event"),
        ("dlab.views.panel", "from dlab.events import Event\nfrom dlab import data"),
        ("dlab.cli", "from dlab import __version__, demo\nimport dlab"),
        ("dlab.data.files", "from dlabtools import x"),  # only looks like one of ours
    ],
)
def test_a_downward_import_is_fine(module, source):
    assert upward_imports(source, module) == []


def test_the_package_of_a_relative_import_is_its_own():
    assert upward_imports("from .cluster import Cluster", "dlab.processes", is_package=True) == []
    assert upward_imports("from ..strategies import DDP", "dlab.processes", is_package=True) != []


# ----------------------------------------------------------------------------------------- the words

# Words that the field does not use, and the field's own word for each.
REPLACED = {
    **dict.fromkeys(("bell", "bells"), "semaphore"),
    **dict.fromkeys(("courier", "couriers"), "relay"),
    **dict.fromkeys(("crew", "crews"), "worker pool"),
    **dict.fromkeys(("flight", "flights"), "run state"),
    **dict.fromkeys(("inbox", "inboxes"), "mailbox"),
    **dict.fromkeys(("letter", "letters", "parcel", "parcels"), "message"),
    **dict.fromkeys(("meeting", "meetings"), "rendezvous"),
    **dict.fromkeys(("trainee", "trainees"), "trainer"),
    **dict.fromkeys(("wire", "wires"), "transport"),
    "patience": "backoff",
}


def classes_defined_twice(sources: dict[str, str]) -> list[str]:
    """Class names that several modules define, whether public or private, as sentences."""
    places: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module)
    return [f"{name} is defined in {' and '.join(found)}" for name, found in places.items() if len(found) > 1]


def replaced_words(source: str) -> list[str]:
    """The words of a source, also those inside of names, for which the field has another word."""
    used = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", source)}
    return [f"{word}: say {REPLACED[word]}" for word in sorted(used & REPLACED.keys())]


def test_one_class_name_means_one_thing():
    assert classes_defined_twice({str(path): (TOP / path).read_text() for path in MODULES}) == []


def test_a_class_name_with_two_meanings_is_found():
    sources = {"one.py": "class Table: ...", "two.py": "def make():\n    class _Table: ...", "three.py": "Table = 1"}
    assert classes_defined_twice(sources) == ["Table is defined in one.py and two.py"]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_the_words_are_those_of_the_field(path):
    assert replaced_words((TOP / path).read_text()) == []


def test_a_word_that_the_field_does_not_use_is_found():
    source = 'class CrewMember:\n    """Rings a bell."""\n    def _open_inbox(self): ...'
    assert replaced_words(source) == ["bell: say semaphore", "crew: say worker pool", "inbox: say mailbox"]
    assert replaced_words("newsletter, Labelled, wireless") == []


# ------------------------------------------------------------------------------------- the notebooks

NOTEBOOKS = sorted((TOP / "notebooks").glob("**/*.ipynb"))
NOTEBOOKS = [path for path in NOTEBOOKS if ".ipynb_checkpoints" not in path.parts]
LONGEST_CELL = 15
IGNORED = ("nbval-ignore-output", "pytest-validate-ignore-output")
SKIPPED = ("nbval-skip", "raises-exception", "nbval-raises-exception")


def tags(cell: Any) -> set[str]:
    """What nbval reads: the cell's tags, and the same words in capitals in comments."""
    comments = re.findall(r"^\s*#\s*((?:NBVAL|PYTEST)_\w+)\s*$", cell.source, re.MULTILINE)
    return {*cell.metadata.get("tags", []), *(comment.lower().replace("_", "-") for comment in comments)}


def shows_text(cell: Any) -> bool:
    """Whether nbval has something to compare in a cell's outputs."""
    return any(output.output_type == "stream" or "text/plain" in output.get("data", {}) for output in cell.outputs)


def is_compared(cell: Any) -> bool:
    """Whether nbval fails when the text of a cell changes."""
    return shows_text(cell) and not tags(cell).intersection(IGNORED)


def asserts(cell: Any) -> bool:
    """Whether a cell fails by itself when something is not true; nbval sees that whatever it ignores."""
    return bool(re.search(r"^\s*assert\b", cell.source, re.MULTILINE))


def has_alt_text(cell: Any, output: Any) -> bool:
    """Whether a picture says in words what is to be seen: `<img alt=…>` beside it, or "alt" in the cell's metadata."""
    html = output.data.get("text/html", "")
    return bool(re.search(r"<img\b[^>]*\balt=([\"'])\s*[^\"'\s]", html) or str(cell.metadata.get("alt", "")).strip())


MOST_VERDICTS = 2  # lines of a notebook that say True or False, and no number


def notebook_problems(notebook: Any) -> list[str]:
    """What a reader, or nbval, would stumble over; one sentence each."""
    problems = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        problems.append("the kernelspec must be python3, the one that everybody has")
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        problems.append("a notebook opens with words")
    if [cell.execution_count for cell in code] != [*range(1, len(code) + 1)]:
        problems.append("run it from top to bottom in a fresh kernel: the cells are not numbered 1, 2, 3, …")
    for number, cell in enumerate(code):
        where = f"cell {number}"  # as nbval counts
        following = code[number + 1] if number + 1 < len(code) else None
        if any(output.output_type == "error" for output in cell.outputs):
            problems.append(f"{where} is stored with an error")
        for word in ("sys.path", "%pip", "!pip", "%conda"):
            if word in cell.source:
                problems.append(f"{where} uses {word}: the environment has everything")
        if len(cell.source.rstrip().splitlines()) > LONGEST_CELL:
            problems.append(f"{where} has more than {LONGEST_CELL} lines: which second idea is in it?")
        for tag in tags(cell).intersection(SKIPPED):
            problems.append(f"{where} has {tag}: every cell runs, and without an error")
        checked = asserts(cell) or (following and (asserts(following) or is_compared(following)))
        if tags(cell).intersection(IGNORED) and not checked:
            problems.append(f"{where} is not compared: assert what must be true, there or in the next cell")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}) and not has_alt_text(cell, output):
                problems.append(f"{where} has a picture without alt text")
    printed = [line for cell in code for output in cell.outputs for line in output.get("text", "").splitlines()]
    if sum(line.endswith((": True", ": False")) for line in printed) > MOST_VERDICTS:
        problems.append("lines that say True tell a learner nothing: print the number, and assert what must be true")
    return problems


def test_there_is_a_tour():
    assert TOP / "notebooks" / cli.FIRST_NOTEBOOK in NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook_problems(notebook) == []


def made_up(*cells: Any, kernel: str = "python3", words: bool = True) -> Any:
    opening = [nbformat.v4.new_markdown_cell("# What is a rank?")] if words else []
    kernelspec = {"name": kernel, "display_name": kernel}
    return nbformat.v4.new_notebook(cells=[*opening, *cells], metadata={"kernelspec": kernelspec})


def code_cell(source: str = "print(1)", count: int | None = 1, *tags: str, outputs: Any = None, **metadata: Any) -> Any:
    stored = [nbformat.v4.new_output("stream", text="1\n")] if outputs is None else outputs
    metadata |= {"tags": [*tags]}
    return nbformat.v4.new_code_cell(source, execution_count=count, outputs=stored, metadata=metadata)


def picture(**more: str) -> list[Any]:
    return [nbformat.v4.new_output("display_data", data={"image/png": "iVBORw0KGgo=", **more})]


ERROR = [nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])]


@pytest.mark.parametrize(
    ("notebook", "problem"),
    [
        (made_up(code_cell(), kernel="my-env"), "kernelspec"),
        (made_up(code_cell(), words=False), "opens with words"),
        (made_up(code_cell(count=None, outputs=[])), "top to bottom"),
        (made_up(code_cell(count=2), code_cell(count=1)), "top to bottom"),
        (made_up(code_cell(outputs=ERROR)), "error"),
        (made_up(code_cell("import sys; sys.path.append('..')")), "sys.path"),
        (made_up(code_cell("%pip install torch")), "%pip"),
        (made_up(code_cell("a = 1\n" * 16)), "lines"),
        (made_up(code_cell("print(1)", 1, "nbval-skip")), "nbval-skip"),
        (made_up(code_cell("# NBVAL_SKIP\nprint(1)")), "nbval-skip"),
        (made_up(code_cell("print(1)", 1, "nbval-ignore-output")), "not compared"),
        (made_up(code_cell("# NBVAL_IGNORE_OUTPUT\nprint(1)"), code_cell("a = 1", 2, outputs=[])), "not compared"),
        (made_up(code_cell("print('assert')", 1, "nbval-ignore-output")), "not compared"),
        (made_up(code_cell(outputs=3 * [nbformat.v4.new_output("stream", text="the same bits: True\n")])), "number"),
        (made_up(code_cell(outputs=picture())), "alt text"),
        (made_up(code_cell(outputs=picture(**{"text/html": '<img alt="" src="x">'}))), "alt text"),
    ],
)
def test_a_problem_in_a_notebook_is_found(notebook, problem):
    (found,) = notebook_problems(notebook)
    assert problem in found


@pytest.mark.parametrize(
    "notebook",
    [
        made_up(code_cell("a = 1\n" * 15)),
        made_up(code_cell("print(1)", 1, "nbval-ignore-output"), code_cell(count=2)),
        made_up(code_cell("print(1)\nassert True", 1, "nbval-ignore-output")),
        made_up(code_cell("run", 1, "nbval-ignore-output"), code_cell("assert run.done", 2, outputs=[])),
        made_up(code_cell(outputs=picture(**{"text/html": '<img src="x" alt="loss falls">'}))),
        made_up(code_cell(outputs=picture(), alt="loss falls")),
    ],
)
def test_a_clean_notebook_is_fine(notebook):
    assert notebook_problems(notebook) == []


# ----------------------------------------------------------------------------------------- the texts

TEXTS = ["README.md", "CONTRIBUTING.md"]


def code_in(text: str) -> list[str]:
    """The lines of a Markdown text's code blocks, and its code spans."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [*(line.strip() for block in blocks for line in block.splitlines()), *spans]


def commands_in(text: str, program: str) -> list[list[str]]:
    """The words after `program` wherever a text shows it being called."""
    calls = [re.split(r"\s(?:#|&&|\|)", line)[0] for line in code_in(text)]
    return [shlex.split(call)[1:] for call in calls if call.split(" ")[0] == program and " " in call]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (TOP / "Makefile").read_text(), re.MULTILINE))


def makefile_variables() -> set[str]:
    return set(re.findall(r"^([A-Z_]+) \?=", (TOP / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", TEXTS)
def test_every_make_command_in_the_texts_exists(name):
    calls = commands_in((TOP / name).read_text(), "make")
    assert calls, f"{name} names no make command at all"
    for words in calls:
        for word in words:
            variable, is_setting, _ = word.partition("=")
            known = makefile_variables() if is_setting else makefile_targets()
            assert (variable if is_setting else word) in known, f"{name} says make {' '.join(words)}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_dlab_command_in_the_texts_exists(name):
    for words in commands_in((TOP / name).read_text(), "dlab"):
        try:
            cli.make_parser().parse_args(words)
        except SystemExit as end:
            assert not end.code, f"{name} says dlab {' '.join(words)}"


def test_the_readme_begins_with_the_two_commands():
    first_screen = (TOP / "README.md").read_text().splitlines()[:30]
    assert "make lab" in "\n".join(first_screen)
    assert "make test" in "\n".join(first_screen)


def test_the_readme_is_short():
    assert len((TOP / "README.md").read_text().splitlines()) < 120


def test_the_readme_names_every_command():
    calls = (TOP / "README.md").read_text()
    assert {words[0] for words in commands_in(calls, "dlab")} >= {"lab", "demo", "train", "run", "data"}
    assert {words[0] for words in commands_in(calls, "make")} >= {"lab", "test", "bench", "check"}


@pytest.mark.parametrize("name", TEXTS)
def test_links_to_files_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", (TOP / name).read_text()):
        assert target.startswith("https://") or (TOP / target).exists(), f"{name} links to {target}"


def test_python_code_in_the_readme_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (TOP / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"readme_{number}.py"
        script.write_text(block)
        answer = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert answer.returncode == 0, answer.stderr
        promised = re.findall(r"#  ?prints: (.*)", block)
        for line in promised:
            assert line in answer.stdout.splitlines(), f"the README promises {line!r}, it printed:\n{answer.stdout}"


def test_plain_pytest_runs_the_notebooks_too(request):
    assert request.config.getini("testpaths") == ["tests", "notebooks"]
    assert request.config.option.nbval
    assert request.config.option.nbval_cell_timeout < float(request.config.getini("timeout"))
