"""Show a setting as a slider or a picker, and keep its value in the address."""

import streamlit as st

from fsdp_inspect_app.knobs import AS_RECORDED, Knob
from fsdp_inspect_app.selection import follow, link


def show_knob(knob: Knob, recorded: str | None = None) -> str | None:
    """Show the widget of a knob; returns the chosen value, or None for the recorded value.

    Args:
        knob: The knob.
        recorded: The value in the recorded plan, in one or two words.
    """
    options = [AS_RECORDED, *knob.options]
    follow(knob.name, knob.name, {text: text for text in knob.options}, AS_RECORDED)
    if st.session_state[knob.name] not in options:
        st.session_state[knob.name] = AS_RECORDED
    own = f"{AS_RECORDED}: {recorded}" if recorded else AS_RECORDED

    def name_option(text: str) -> str:
        return own if text == AS_RECORDED else text

    if knob.is_slider:
        text = st.select_slider(
            knob.label, options, key=knob.name, help=knob.help, format_func=name_option
        )
    else:
        text = st.selectbox(
            knob.label, options, key=knob.name, help=knob.help, format_func=name_option
        )
    chosen = None if text == AS_RECORDED else str(text)
    link(knob.name, chosen)
    return chosen
