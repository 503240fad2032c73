"""Show the settings of a simulation, and the file of its prediction."""

from collections.abc import Callable
from typing import Any

import streamlit as st

from fsdp_inspect.result_types import Prediction
from fsdp_inspect_app.knobs import AS_RECORDED, PREDICTION_FILE, Knob
from fsdp_inspect_app.selection import pick


def show_knob(knob: Knob, recorded: str | None = None) -> str | None:
    """Show the widget of a knob; returns the chosen value, or None for the recorded value.

    Args:
        knob: The knob.
        recorded: The value in the recorded plan, in one or two words.
    """
    own = f"{AS_RECORDED}: {recorded}" if recorded else AS_RECORDED

    def name_option(text: str) -> str:
        return own if text == AS_RECORDED else text

    show: Any = st.select_slider if knob.is_slider else st.selectbox
    text = pick(
        knob.label,
        [AS_RECORDED, *knob.options],
        AS_RECORDED,
        name=knob.name,
        show=show,
        is_default_hidden=True,
        help=knob.help,
        format_func=name_option,
    )
    return None if text == AS_RECORDED else text


def show_prediction_button(make: Callable[[], Prediction]) -> None:
    """Show a button that saves a prediction, made when the button is clicked."""
    st.download_button(
        PREDICTION_FILE,
        lambda: make().model_dump_json(indent=1),
        file_name=PREDICTION_FILE,
        mime="application/json",
        icon=":material/download:",
        key="prediction-file",
        on_click="ignore",
        help="fsdp-inspect verify compares the prediction with the run of the plan.",
    )
