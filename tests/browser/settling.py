"""Know when a page of the dashboard is up to date, however slow the machine is.

A script in the page reads the messages between Streamlit and its server: a page is busy from a
request until the end of the script run that answers it. Elements alone do not show that: a click
changes nothing until its request has reached the server.
"""

from playwright.sync_api import BrowserContext, Page
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg, ForwardMsgMetadata, RunIdentity

PATIENCE_MS = 180_000
"""The time limit for each condition: only a broken page exceeds it."""
_STILL_MS = 300
"""The time without a script and without changes of the page after which it counts as settled. A
click may run two scripts with a pause between them, and a chart that is drawn again removes its
marks."""
_LONGEST_FRAME_MS = 50
"""The most that one frame adds to that time, so that a browser that stands still adds nothing."""


def _number(message: type, field: str) -> int:
    return int(message.DESCRIPTOR.fields_by_name[field].number)  # type: ignore[attr-defined]


_RERUN = _number(BackMsg, "rerun_script")
_IS_PERIODIC = _number(ClientState, "is_auto_rerun")
_STARTED, _ENDED = _number(ForwardMsg, "new_session"), _number(ForwardMsg, "script_finished")
_METADATA, _RUN = _number(ForwardMsg, "metadata"), _number(ForwardMsgMetadata, "run")
_FRAGMENTS = _number(RunIdentity, "fragment_ids")

_WATCH = f"""(() => {{
  const watch = {{ requests: 0, isRequested: false, isRunning: false, runs: 0, stillMs: 0 }};
  window.pageWatch = watch;
  const fields = (bytes) => {{  // the fields of a message, in the wire format of protobuf
    const found = new Map();
    let at = 0;
    const number = () => {{
      let value = 0, scale = 1, byte;
      do {{ byte = bytes[at++]; value += (byte & 127) * scale; scale *= 128; }} while (byte > 127);
      return value;
    }};
    while (at < bytes.length) {{
      const tag = number(), kind = tag % 8;
      let value = null;
      if (kind === 0) value = number();
      else if (kind === 1) at += 8;
      else if (kind === 5) at += 4;
      else {{ const size = number(); value = bytes.subarray(at, at + size); at += size; }}
      found.set(Math.floor(tag / 8), value);
    }}
    return found;
  }};
  const sent = (bytes) => {{
    const request = fields(bytes).get({_RERUN});
    if (!request || fields(request).get({_IS_PERIODIC})) return;
    watch.requests++;
    watch.isRequested = true;
  }};
  const received = (bytes) => {{
    const found = fields(bytes), started = found.get({_STARTED});
    if (started) {{
      const run = fields(fields(found.get({_METADATA})).get({_RUN}));
      // A fragment that runs periodically leaves the rest of the page as it is.
      watch.isRunning = watch.isRequested || !run.has({_FRAGMENTS});
      watch.isRequested = false;
      watch.runs++;
    }} else if (found.has({_ENDED})) watch.isRunning = false;
    else return;
    watch.stillMs = 0;
  }};
  window.WebSocket = class extends WebSocket {{
    constructor(...words) {{
      super(...words);
      this.addEventListener('message', async ({{ data }}) =>
        received(new Uint8Array(data instanceof Blob ? await data.arrayBuffer() : data)));
    }}
    send(data) {{
      if (data instanceof Uint8Array) sent(data);
      super.send(data);
    }}
  }};
  new MutationObserver(() => {{ watch.stillMs = 0; }})
    .observe(document, {{ childList: true, subtree: true }});
}})()"""
_IS_SETTLED = f"""(wait) => {{
  const watch = window.pageWatch, now = performance.now();
  if (watch.wait !== wait) Object.assign(watch, {{ wait, stillMs: 0, seenAt: now }});
  watch.stillMs += Math.min(now - watch.seenAt, {_LONGEST_FRAME_MS});
  watch.seenAt = now;
  if (!watch.runs || watch.isRequested || watch.isRunning) watch.stillMs = 0;
  return watch.stillMs > {_STILL_MS}
    && !document.querySelector('[data-testid="stSkeleton"]')
    && [...document.querySelectorAll('[class*=st-key-chart-]')].every((chart) =>
      chart.querySelector('.chart')?.childElementCount);
}}"""
_GO = """address => {
  const before = window.pageWatch.requests;
  history.pushState({}, '', address);
  window.dispatchEvent(new PopStateEvent('popstate'));
  return window.pageWatch.requests > before;
}"""
"""Like the browser's back button: the page's script runs in the existing session."""


class _Waits:
    """The number of waits so far, which identifies each one."""

    count = 0


def prepare(context: BrowserContext) -> BrowserContext:
    """Give the pages of a context long time limits, and watch their messages."""
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(_WATCH)
    return context


def settle(page: Page) -> None:
    """Wait until no script runs, everything is drawn and nothing changes."""
    page.locator(".st-key-headline").wait_for()
    _Waits.count += 1
    page.wait_for_function(_IS_SETTLED, arg=_Waits.count)


def go(page: Page, address: str) -> bool:
    """Go to a page of the session; returns False if the page requested no script run."""
    return bool(page.evaluate(_GO, address))
