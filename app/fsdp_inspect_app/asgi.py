"""The dashboard as an ASGI application: Streamlit's own application, behind the guard.

`streamlit run asgi.py` finds `app`. `launch` starts it and passes the accepted requests.
"""

from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware

from fsdp_inspect_app.guard import Guard
from fsdp_inspect_app.launch import receive_access
from fsdp_inspect_app.shell import Shell

# Browsers send a cookie to every port of a host, so each dashboard has a separate cookie.
_COOKIE = f"fsdp-inspect-token-{st.get_option('server.port')}"

app = st.App(
    Path(__file__).with_name("streamlit_app.py"),
    middleware=[Middleware(Guard, access=receive_access(), cookie=_COOKIE), Middleware(Shell)],
)
