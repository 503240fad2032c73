"""Check access to the runs: for everyone who reaches the server, or only for logged-in users.

The login is Streamlit's own (OpenID Connect), configured in `secrets.toml`:

    [auth]
    redirect_uri = "https://runs.example.org/oauth2callback"
    cookie_secret = "..."
    client_id = "..."
    client_secret = "..."
    server_metadata_url = "https://accounts.example.org/.well-known/openid-configuration"

    [access]
    emails = ["ada@example.org"]
    domains = ["example.org"]

With `[auth]`, nothing is shown before a login. Without `[access]`, every account of the provider
may see the runs. With it, only the named addresses may, if the provider has verified them.
"""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from fsdp_inspect_app.cards import show_headline
from fsdp_inspect_app.wording import plain

_AUTH, _ACCESS = "auth", "access"


def has_access() -> bool:
    """Whether the user may see the runs. Nothing of a run may be read before."""
    secrets = _read_secrets()
    if _AUTH not in secrets:
        return True
    user = st.user.to_dict()
    return bool(user.get("is_logged_in", False)) and may_enter(user, secrets.get(_ACCESS, {}))


def require_login() -> None:
    """Continue for users with access; all other users are asked to log in."""
    if has_access():
        return
    user = st.user.to_dict()
    if not user.get("is_logged_in", False):
        show_headline("These runs are shown after a login\\.")
        st.button("Log in", on_click=st.login, type="primary", key="log-in")
    else:
        show_headline("This account may not see these runs\\.")
        st.markdown(plain(f"You are logged in as {user.get('email', 'an account without email')}."))
        st.button("Log out", on_click=st.logout, key="log-out")
    st.stop()


def may_enter(user: Mapping[str, Any], access: Mapping[str, Any]) -> bool:
    """Whether a logged-in user has access to the runs.

    Args:
        user: The provider's data about the user: `email`, and `email_verified` if present.
        access: The section `access`; an empty one allows every user.
    """
    if not access:
        return True
    email = str(user.get("email") or "").casefold()
    if not email or user.get("email_verified") is False:
        return False
    emails = {str(one).casefold() for one in access.get("emails", ())}
    domains = {str(one).casefold() for one in access.get("domains", ())}
    return email in emails or email.rpartition("@")[2] in domains


def _read_secrets() -> Mapping[str, Any]:
    """The secrets of the server; empty without a file of secrets."""
    return st.secrets if st.secrets.load_if_toml_exists() else {}
