"""The README and docs/ are correct: commands exist, code runs, links lead to files.

Code blocks marked `python` run unchanged, on two ranks, in a separate folder. The variables `model`
(sharded, returns an object with `.loss`), `optimizer`, `loader` and `mesh` are defined. Blocks
marked `console` or `bash` contain commands.
"""

import ast
import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_group

from fsdp_inspect import __version__
from fsdp_inspect.cli.application import build_application
from fsdp_inspect.cli.sections import SECTIONS
from fsdp_inspect.metrics import METRICS
from tests.builders import write_run
from tests.conftest import Invoke, Torchrun
from tests.simulation.test_buckets import BLOCKS, assign, run_of
from tests.simulation.test_zero3_messages import engine_run
from tests.simulation.test_zero_buckets import LAYERS, zero_run

ROOT = Path(__file__).parents[1]
GUIDES = ("README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
DOCUMENTS = (
    *GUIDES,
    "CHANGELOG.md",
    ".github/CONTRIBUTING.md",
    ".github/SECURITY.md",
    "tests/gpu/README.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "samples").glob("**/README.md")),
)
PAGES_WITHOUT_ENTRY = {"api.md"}
"""docs/site_pages.py adds their entries in the navigation."""
COMMANDS = get_group(build_application()).commands
EXAMPLES = {
    "llama-1b": "tiny-2-ranks",
    "llama": "hsdp-4-ranks",
    "a": "tiny-2-ranks",
    "b": "async-prefetch-2-ranks",
    "before": "tiny-2-ranks",
    "after": "async-prefetch-2-ranks",
}
"""The runs that the guides name, and the samples that stand for them."""
ELSEWHERE = re.compile(
    r"s3://|--dask|traces|dumps|forecasts|parts/|my_project|--grid|--baseline-runs|numerics|fsdp1"
    r"|inspect (app|demo|record|equivalence|tune|plan|verify|store metrics)"
)
"""Commands that need a store, a cluster, files of a training or minutes, or that serve."""

READER = '''
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.recording.torch_api.process_groups import release_process_groups


class Reader(torch.nn.Module):
    """A model as the examples assume it."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, batch):
        for layer in self.layers:
            batch = layer(batch)
        return SimpleNamespace(loss=batch.square().mean())


def at_hand(shard):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Reader()
    if shard:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = [torch.randn(4, 8) for _ in range(3)]
    return dict(model=model, optimizer=optimizer, loader=loader, mesh=mesh)


dist.init_process_group("gloo")
names = {}
for block in BLOCKS:
    names |= at_hand(shard="apply_plan(" not in block)
    exec(block, names)
dist.destroy_process_group()
release_process_groups()
'''


def guides() -> str:
    return "\n".join((ROOT / page).read_text() for page in GUIDES)


def code_blocks(*languages: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", guides(), flags=re.MULTILINE | re.DOTALL)
    return [code for language, code in blocks if language in languages]


def command_lines(program: str) -> list[list[str]]:
    """The guides' commands that start with `program`, as words, with continued lines joined."""
    text = "\n".join(code_blocks("console", "bash")).replace("\\\n", " ")
    text = re.sub(r'"[^"]*"', lambda quoted: quoted[0].replace("\n", " "), text)
    lines = [line.removeprefix("$ ").strip() for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(program)]


def flags_of(words: list[str]) -> set[str]:
    """The options of a command; words after `--` belong to another command."""
    words = words[: words.index("--")] if "--" in words else words
    return {word.split("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("command", [name for name in COMMANDS if not COMMANDS[name].hidden])
def test_command_is_in_the_guide_and_has_help(command: str) -> None:
    parts = getattr(COMMANDS[command], "commands", {})
    helps = [each.help or "" for each in (COMMANDS[command], *parts.values())]
    assert all("Example: " in text for text in (helps[1:] if command == "store" else helps))
    guide = (ROOT / "docs/commands.md").read_text()
    for words in ((command, part) for part in parts or [""]):
        assert f"`fsdp-inspect {' '.join(words).strip()}" in guide


def find_mistake(text: str) -> str | None:
    """Why a printed command is none; None if it is one. `text` follows `fsdp-inspect `."""
    name, *words = re.findall(r"\"[^\"]*\"|'[^']*'|\S+", text)
    if name == "X":  # a text that names any command
        return None
    command = COMMANDS.get(name.rstrip(".,:)"))
    if command is None or command.hidden:
        return f"unknown command {name!r}"
    parts = getattr(command, "commands", {})
    if name == "store" and words[0].rstrip(".,") not in parts:
        return f"unknown part {words[0]!r}"
    if words and words[0].rstrip(".,") in parts:
        command = parts[words.pop(0).rstrip(".,")]
    if name == "record":
        return None
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    unknown = flags_of(words) - known - {"--help"}
    if unknown:
        return f"unknown option {unknown}"
    if name == "show":
        sections = itertools.takewhile(str.isalpha, words[1:])
        return next(
            (f"unknown section {each!r}" for each in sections if each not in SECTIONS), None
        )
    return None


def printed_commands() -> dict[str, str]:
    """The commands in backquotes and after a colon in all texts of the source, with their file."""
    found = {}
    for folder in ("fsdp_inspect", "app/fsdp_inspect_app", "instrumented_trainer"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for text in texts_of(node):
                    found |= dict.fromkeys(commands_in(text), str(path.relative_to(ROOT)))
    return found


def texts_of(node: ast.AST) -> list[str]:
    """The text of a string in source code; `X` stands for a value that is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
        return ["".join(map(str, parts))]
    return []


def commands_in(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text)
    quoted = re.findall(r"`fsdp-inspect ([^`]+)`", text)
    return [*quoted, *re.findall(r": fsdp-inspect ([^`,;()]+?)(?=[,;`(]|\. |\.?$)", text)]


def test_commands_in_all_texts_exist_with_their_sections_and_options() -> None:
    printed = printed_commands()
    in_guides = commands_in(" ".join(re.sub(r"```.*?```", "", guides(), flags=re.DOTALL).split()))
    pasted = [shlex.join(words[1:]) for words in command_lines("fsdp-inspect ")]
    assert min(len(printed), len(in_guides), len(pasted)) > 40
    places = {**dict.fromkeys([*in_guides, *pasted], "a guide"), **printed}
    mistakes = {text: (find_mistake(text), place) for text, place in places.items()}
    assert {text: found for text, found in mistakes.items() if found[0] is not None} == {}


def test_the_readme_shows_the_verdict_that_is_printed(run_python: Torchrun) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"fsdp-inspect (show [^\n]*)\n```\n\n```text\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    command = shown[1].replace("samples/", f"{ROOT}/samples/").split()
    printed = run_python("-m", "fsdp_inspect", *command).stdout
    assert printed.split() == shown[2].split()
    assert len(readme.splitlines()) <= 120


def test_commands_of_the_guides_run_as_pasted(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "samples", tmp_path / "samples")
    for name, sample in EXAMPLES.items():
        shutil.copytree(ROOT / "samples" / sample, tmp_path / "runs" / name)
    write_run(run_of(assign(BLOCKS, 12.0)), tmp_path / "runs" / "ddp")
    write_run(zero_run(LAYERS, 1_000_000), tmp_path / "runs" / "zero2")
    write_run(engine_run(), tmp_path / "runs" / "zero3")
    monkeypatch.chdir(tmp_path)
    lines = [shlex.join(words) for words in command_lines("fsdp-inspect ")]
    own = [line for line in dict.fromkeys(lines) if not ELSEWHERE.search(line)]
    assert len(own) > 15
    for line in own:
        ended = invoke(*shlex.split(line)[1:])
        assert (ended.code, bool(ended.out)) == (0, True), f"{line}\n{ended.err}"


def test_trainer_options_in_the_guides_exist(run_python: Torchrun) -> None:
    lines = [line for line in command_lines("torchrun ") if "instrumented_trainer" in line]
    shown = run_python("-m", "instrumented_trainer", "--help", cwd=ROOT).stdout

    assert lines
    for line in lines:
        for flag in flags_of(line[line.index("instrumented_trainer") :]):
            assert re.search(rf"{flag}\b", shown), f"{flag} is not in the trainer's --help"


def test_make_targets_in_the_documents_exist() -> None:
    text = "\n".join((ROOT / name).read_text() for name in DOCUMENTS)
    named = set(re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, flags=re.MULTILINE))

    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

    assert {"demo", "test", "check"} <= named <= set(targets)


def test_shell_blocks_in_the_guides_are_shell() -> None:
    for block in code_blocks("bash", "console"):
        commands = re.sub(r"^\$ ", "", block, flags=re.MULTILINE)
        checked = subprocess.run(
            ["bash", "-n"], input=commands, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr


@pytest.mark.distributed
def test_python_blocks_in_the_guides_run(
    tmp_path: Path, run_ranks: Torchrun, run_python: Torchrun
) -> None:
    blocks = code_blocks("python")
    script = tmp_path / "reader.py"
    script.write_text(f"BLOCKS = {blocks!r}\n{READER}")

    (tmp_path / "samples").symlink_to(ROOT / "samples")
    run_ranks(script, cwd=tmp_path)

    assert any("Recorder(" in block for block in blocks)
    recorded = list(tmp_path.rglob("run.json"))
    assert recorded
    for manifest in recorded:
        assert run_python("-m", "fsdp_inspect", "show", manifest.parent, "summary").stdout


def test_links_to_files_lead_somewhere() -> None:
    link = re.compile(r"(?:\]\(|(?:src|href|srcset)=\")(?!http|#)([^)\"\s#]+)")
    dead = [
        f"{document}: {target}"
        for document in DOCUMENTS
        for target in link.findall((ROOT / document).read_text())
        if not (ROOT / document).parent.joinpath(target).exists()
    ]
    assert dead == []


def test_metric_table_of_the_docs_is_that_of_the_code() -> None:
    header = "| metric | key | better | definition |\n|---|---|---|---|\n"
    rows = [
        f"| {metric.label} | `{metric.name}` | {metric.better} | {metric.definition} |\n"
        for metric in METRICS.values()
    ]

    table = header + "".join(rows)

    page = (ROOT / "docs" / "metrics.md").read_text()
    assert table in page, f"the table of docs/metrics.md should be:\n\n{table}"


def test_glossary_defines_each_term_once() -> None:
    terms = [name for name, _ in glossary_rows()]

    assert len(terms) > 100
    assert sorted(name for name in set(terms) if terms.count(name) > 1) == []


def test_glossary_does_not_use_a_rejected_word_as_a_term() -> None:
    rejected = {word for _, words in glossary_rows() for word in words}

    assert len(rejected) > 20
    assert {name for name, _ in glossary_rows()} & rejected == set()


def glossary_rows() -> list[tuple[str, list[str]]]:
    """The terms of the glossary, each with the words that are not used for it."""
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| (?!term )([^|]+) \| [^|]+ \|([^|]*)\|$", page, flags=re.MULTILINE)
    rejected = [[word.strip() for word in words.split(",") if word.strip()] for _, words in rows]
    return [
        (name.strip(), words)
        for (names, _), words in zip(rows, rejected, strict=True)
        for name in names.split(",")
    ]


def test_every_page_of_the_docs_is_in_the_navigation_of_the_site() -> None:
    navigation = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - PAGES_WITHOUT_ENTRY

    assert [page for page in sorted(pages) if f"'{page}'" not in navigation] == []


def test_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", ["bug_report", "wrong_number", "feature_request"])
def test_issue_template_has_what_the_platform_requires(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())

    assert form["name"]
    assert form["description"]
    identifiers = [field["id"] for field in form["body"]]
    assert len(identifiers) == len(set(identifiers))
    assert all(field["attributes"]["label"] for field in form["body"])
