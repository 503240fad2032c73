"""Show a command or code with a button that copies it.

Streamlit's own code block loads a highlighter of 1.5 MB on each page that has a block, which takes
up to half a second of the browser's time.
"""

from pathlib import Path

import streamlit as st

from fsdp_inspect_app.page_sheet import SheetCode, page_sheet

COMPONENT = "fsdp_inspect_code"

_mount = st.components.v2.component(
    COMPONENT,
    js=Path(__file__).with_name("code_block.js").read_text(encoding="utf-8"),
    isolate_styles=False,  # the style sheet is on the page once
)


def show_code(text: str, *, key: str, language: str = "bash", is_shared: bool = True) -> None:
    """Show text as it is, with a button that copies it.

    Args:
        text: The command or code.
        key: Unique on the page.
        language: The language of the text; `bash` for commands.
        is_shared: Whether the text is in the file of a page that is saved.
    """
    if is_shared:
        page_sheet().add(SheetCode(text))
    _mount(data={"text": text, "language": language}, key=f"code-{key}")
