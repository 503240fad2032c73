"""Add pages from outside docs/ and the API reference to the documentation site.

MkDocs loads this file as a hook. Links between documents work on the hosting platform and on the
site: a link to another page is rewritten, and a link to a source file becomes its path. A link to
a file that does not exist fails the build.
"""

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = "docs"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
    "samples/README.md": "samples/index.md",
    "tests/gpu/README.md": "gpu-tests.md",
}
"""Pages outside docs/: path in the repository and path on the site."""
IMAGES = ".github/images"
SAMPLES = "samples"
OPTIONAL_PAGES = {"api.md": "Guide"}
"""Pages of the section Python API that appear if their file exists: path in docs/ and title."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
_EXTERNAL = ("http://", "https://", "mailto:", "#")


def on_config(config: Any) -> Any:
    """Complete the navigation with the pages that exist."""
    for section in config.nav:
        if "Python API" in section:
            found = [name for name in OPTIONAL_PAGES if (ROOT / DOCS / name).exists()]
            section["Python API"][:0] = [{OPTIONAL_PAGES[name]: name} for name in found]
        if "Guides" in section:
            section["Guides"] += [
                {path.stem: path.as_posix()} for path in map(PurePosixPath, _samples().values())
            ]
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages outside docs/, the images, and the API reference."""
    for source, target in _pages().items():
        if not source.startswith(f"{DOCS}/"):
            files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for image in sorted((ROOT / IMAGES).glob("*.png")):
        files.append(File.generated(config, f"images/{image.name}", abs_src_path=str(image)))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page from the repository's layout to the site's."""
    targets = _pages()
    source = next((path for path, site in targets.items() if site == page.file.src_uri), None)
    if source is None:
        return markdown
    pieces = _CODE.split(markdown)
    return "".join(
        piece if _CODE.fullmatch(piece) else _LINK.sub(lambda m: _relink(m, source, targets), piece)
        for piece in pieces
    )


def _relink(link: re.Match[str], source: str, targets: dict[str, str]) -> str:
    bang, text, address = link.groups()
    if address.startswith(_EXTERNAL):
        return link[0]
    name, _, fragment = address.partition("#")
    path = PurePosixPath(os.path.normpath(PurePosixPath(source).parent / name)).as_posix()
    if not (ROOT / path).exists():
        raise PluginError(f"{source} links to {address!r}, which does not exist.")
    if path.startswith(f"{IMAGES}/"):
        site = f"images/{PurePosixPath(path).name}"
    elif path in targets:
        site = targets[path]
    else:
        return f"`{path}`" if text in path else f"{text} (`{path}`)"
    relative = PurePosixPath(os.path.relpath(site, PurePosixPath(targets[source]).parent))
    return f"{bang}[{text}]({relative.as_posix()}{'#' if fragment else ''}{fragment})"


def _pages() -> dict[str, str]:
    own = {f"{DOCS}/{path.name}": path.name for path in (ROOT / DOCS).glob("*.md")}
    return {**PAGES, **_samples(), **own}


def _samples() -> dict[str, str]:
    readmes = sorted((ROOT / SAMPLES).glob("*/README.md"))
    return {
        path.relative_to(ROOT).as_posix(): f"{SAMPLES}/{path.parent.name}.md" for path in readmes
    }


def _reference() -> str:
    """The public names of the package, each with its docstring."""
    tree = ast.parse((ROOT / "fsdp_inspect" / "__init__.py").read_text())
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    entries = "\n".join(f"::: fsdp_inspect.{name}\n" for name in names if not name.startswith("_"))
    return f"# API reference\n\nThe public names of the package `fsdp_inspect`.\n\n{entries}"
