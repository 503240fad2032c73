"""Read a pickle of plain values in bounded memory, without importing or calling anything.

A pickle is a program for a small machine. This machine supports the instructions that build None,
numbers, text, lists, tuples and dictionaries with text keys, of protocols 2 to 5. It rejects
instructions that look up a class or call a function, and names that class or function.

Memory is bounded: each instruction adds the memory of its result to a sum, and a file above the
limit is rejected before it takes that memory. Time is bounded too: each instruction reads at least
one byte and takes constant time, or time that an earlier instruction accounted for. Keys are text,
whose hashes an attacker cannot choose; nested values are never hashed or compared.

`pickle.Unpickler` with a `find_class` that refuses would not be enough, because it limits neither
memory nor time. Measured with CPython 3.11: a file of 9 bytes (`LONG_BINPUT` with the index 2^27)
takes 2 GiB, because the C unpickler keeps its memo in an array. A file of 1 MB takes 227 MiB
(`EMPTY_SET`). 116 bytes take 1.3 s (a key of 26 nested pairs), and each further level doubles the
time. The unpickler has no hook for these instructions, and a limit for the process
(`RLIMIT_AS`) would need a child process that sends the values back.
"""

import pickle
import re
import reprlib
import struct
from collections.abc import Callable
from mmap import mmap
from typing import Any

from fsdp_inspect.errors import CorruptFileError

MAX_MEMORY_BYTES = 4 << 30
"""Memory limit of the values of one pickle, by the estimates below."""

FIRST_PROTOCOL, LAST_PROTOCOL = 2, 5

_MAX_INTEGER_BYTES = 16
_LONG_GETS = re.compile(rb"(?:j.{4})+", re.DOTALL)
_LONG_NUMBER = struct.Struct("<xI")
_REMEDY = (
    "Write the file again: a memory snapshot with torch.cuda.memory._dump_snapshot, a flight "
    "recorder dump with torch."
)

# Sizes of objects in 64-bit CPython 3.11, rounded up.
_NUMBER_BYTES = 32
_TEXT_BYTES = 56
_LIST_BYTES = 88
_TUPLE_BYTES = 56
_DICT_BYTES = 232
_ITEM_BYTES = 8
_PAIR_BYTES = 40
_MEMO_BYTES = 100


def read_plain_pickle(
    data: bytes | mmap, name: str, *, max_memory_bytes: int = MAX_MEMORY_BYTES
) -> Any:
    """Read a pickle that contains plain values only.

    Args:
        data: The whole file, or a memory map of it.
        name: The file's name, for messages.
        max_memory_bytes: Memory limit of the values.

    Raises:
        CorruptFileError: The file is cut off, damaged, too large or of another protocol, or it
            contains other values than plain ones.
    """
    machine = _Machine(data, max_memory_bytes)
    try:
        return machine.run()
    except _Refusal as refusal:
        raise CorruptFileError(f"{name} {refusal}") from None
    except (IndexError, struct.error):
        raise CorruptFileError(
            f"{name} is cut off or damaged at byte {machine.at} of {len(data)}. Expected a "
            f"complete pickle. Copy the file again, if it is complete elsewhere. {_REMEDY}"
        ) from None
    except (UnicodeDecodeError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise CorruptFileError(
            f"{name} is damaged at byte {machine.at} of {len(data)} "
            f"({type(error).__name__}: {reprlib.repr(str(error))}). Expected a pickle of "
            f"dictionaries, lists and numbers. {_REMEDY}"
        ) from None


def starts_like_pickle(head: bytes) -> bool:
    """Whether these first bytes begin a pickle of protocol 2 to 5."""
    return head[:1] == pickle.PROTO and head[1:2] in (b"\2", b"\3", b"\4", b"\5")


class _Refusal(Exception):
    """The error, as the rest of a sentence that begins with the file's name."""


class _Machine:
    """Run the instructions of one pickle; see the module's docstring."""

    def __init__(self, data: bytes | mmap, budget: int) -> None:
        self.at = 0
        self._data = data
        self._budget = budget
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._table: list[Callable[[], None]] = [self._refuse_opcode] * 256
        for opcode, handler in self._handlers().items():
            self._table[opcode[0]] = handler

    def run(self) -> Any:
        """Run the program; returns the value on top of the stack."""
        data, table, memo = self._data, self._table, self._memo
        get, stop = pickle.BINGET[0], pickle.STOP[0]
        if not starts_like_pickle(data[:2]):
            raise _Refusal(
                f"begins with {bytes(data[:4])!r}. Expected a pickle of protocol {FIRST_PROTOCOL} "
                f"to {LAST_PROTOCOL}, as torch writes them. {_REMEDY}"
            )
        self._pay(_ITEM_BYTES * len(data))  # an instruction leaves at most one reference
        while True:
            at = self.at
            opcode = data[at]
            if opcode == get:  # the most frequent instruction: keys, and the frames of stacks
                self._stack.append(memo[data[at + 1]])
                self.at = at + 2
            elif opcode == stop:
                return self._stack.pop()
            else:
                self.at = at + 1
                table[opcode]()

    def _handlers(self) -> dict[bytes, Callable[[], None]]:
        push = self._push_constant
        return {
            pickle.PROTO: self._protocol,
            pickle.FRAME: self._frame,
            pickle.NONE: lambda: push(None),
            pickle.NEWTRUE: lambda: push(True),
            pickle.NEWFALSE: lambda: push(False),
            pickle.BININT1: lambda: self._integer(1, is_signed=False),
            pickle.BININT2: lambda: self._integer(2, is_signed=False),
            pickle.BININT: lambda: self._integer(4, is_signed=True),
            pickle.LONG1: self._long,
            pickle.LONG4: lambda: self._integer(self._unpack("<i", 4), is_signed=True),
            pickle.BINFLOAT: self._float,
            pickle.SHORT_BINUNICODE: lambda: self._text(self._unpack("<B", 1)),
            pickle.BINUNICODE: lambda: self._text(self._unpack("<I", 4)),
            pickle.BINUNICODE8: lambda: self._text(self._unpack("<Q", 8)),
            pickle.EMPTY_LIST: self._empty_list,
            pickle.APPEND: self._append,
            pickle.APPENDS: self._appends,
            pickle.EMPTY_TUPLE: lambda: push(()),
            pickle.TUPLE: self._tuple,
            pickle.TUPLE1: lambda: self._tuple_of(1),
            pickle.TUPLE2: lambda: self._tuple_of(2),
            pickle.TUPLE3: lambda: self._tuple_of(3),
            pickle.EMPTY_DICT: self._empty_dict,
            pickle.SETITEM: self._set_item,
            pickle.SETITEMS: self._set_items,
            pickle.MARK: self._mark,
            pickle.MEMOIZE: lambda: self._remember(len(self._memo)),
            pickle.BINPUT: lambda: self._remember(self._unpack("<B", 1)),
            pickle.LONG_BINPUT: lambda: self._remember(self._unpack("<I", 4)),
            pickle.LONG_BINGET: self._get_several,
        }

    # --- reading and paying

    def _unpack(self, layout: str, size: int) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self.at)
        self.at += size
        return value

    def _take(self, size: int) -> bytes:
        end = self.at + size
        if size < 0 or end > len(self._data):
            raise IndexError
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _pay(self, num_bytes: int) -> None:
        self._budget -= num_bytes
        if self._budget < 0:
            raise _Refusal(
                f"would take more memory than the limit of a snapshot (at byte {self.at} of "
                f"{len(self._data)}). Expected at most a few million trace entries. Record fewer: "
                "torch.cuda.memory._record_memory_history(max_entries=100_000)."
            )

    # --- values

    def _push_constant(self, value: Any) -> None:
        self._stack.append(value)

    def _integer(self, size: int, *, is_signed: bool) -> None:
        if not 0 <= size <= _MAX_INTEGER_BYTES:
            raise _Refusal(
                f"has an invalid integer of {size} bytes. Expected sizes and addresses of at most "
                f"8 bytes. {_REMEDY}"
            )
        end = self.at + size
        digits = self._data[self.at : end]
        if len(digits) < size:
            raise IndexError
        self.at = end
        self._pay(_NUMBER_BYTES)
        self._stack.append(int.from_bytes(digits, "little", signed=is_signed))

    def _long(self) -> None:
        size = self._data[self.at]
        self.at += 1
        self._integer(size, is_signed=True)

    def _float(self) -> None:
        self._pay(_NUMBER_BYTES)
        self._stack.append(self._unpack(">d", 8))

    def _get_several(self) -> None:
        """Push memo entries above 255; one call handles the consecutive frames of a stack."""
        found = _LONG_GETS.match(self._data, self.at - 1)
        if found is None:
            raise IndexError
        self.at = found.end()
        memo = self._memo
        self._stack.extend([memo[number] for (number,) in _LONG_NUMBER.iter_unpack(found[0])])

    def _text(self, size: int) -> None:
        self._pay(_TEXT_BYTES + size)
        self._stack.append(str(self._take(size), "utf-8", "surrogatepass"))

    def _empty_list(self) -> None:
        self._pay(_LIST_BYTES)
        self._stack.append([])

    def _empty_dict(self) -> None:
        self._pay(_DICT_BYTES)
        self._stack.append({})

    def _tuple_of(self, size: int) -> None:
        self._pay(_TUPLE_BYTES)
        if len(self._stack) < size:
            raise IndexError
        self._stack[-size:] = [tuple(self._stack[-size:])]

    # --- containers

    def _mark(self) -> None:
        self._pay(_LIST_BYTES)
        self._outer.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _tuple(self) -> None:
        items = self._pop_mark()
        self._pay(_TUPLE_BYTES + _ITEM_BYTES * len(items))
        self._stack.append(tuple(items))

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        self._pay(_ITEM_BYTES * len(items))
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("items are added to a value that is not a list")
        target.extend(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._pop_mark())

    def _update(self, items: list[Any]) -> None:
        self._pay(_PAIR_BYTES * (len(items) // 2))
        target = self._stack[-1]
        if type(target) is not dict:
            raise TypeError("keys are set on a value that is not a dictionary")
        keys = items[::2]
        if not {*map(type, keys)} <= {str}:
            raise TypeError("a key of a dictionary is not text")
        target.update(zip(keys, items[1::2], strict=True))

    def _remember(self, index: int) -> None:
        self._pay(_MEMO_BYTES)
        self._memo[index] = self._stack[-1]

    # --- headers, and rejected instructions

    def _protocol(self) -> None:
        version = self._unpack("<B", 1)
        if not FIRST_PROTOCOL <= version <= LAST_PROTOCOL:
            raise _Refusal(
                f"is a pickle of protocol {version}. Expected {FIRST_PROTOCOL} to {LAST_PROTOCOL}. "
                f"{_REMEDY}"
            )

    def _frame(self) -> None:
        self.at += 8  # only buffered readers use the length of a frame

    def _refuse_opcode(self) -> None:
        opcode = self._data[self.at - 1]
        raise _Refusal(
            f"contains {self._describe(bytes([opcode]))} at byte {self.at - 1}. Expected "
            "dictionaries, lists, text and numbers only, as torch writes them. No code of it "
            f"was run. Do not unpickle this file with other tools unless you trust it. {_REMEDY}"
        )

    def _describe(self, opcode: bytes) -> str:
        if opcode == pickle.GLOBAL:
            line = bytes(self._data[self.at : self.at + 200]).split(b"\n")[:2]
            return f"the class or function {b'.'.join(line).decode(errors='replace')!r}"
        if opcode == pickle.STACK_GLOBAL:
            name = [part if type(part) is str else "?" for part in self._stack[-2:]]
            return f"the class or function {'.'.join(name)[:200]!r}"
        return f"the pickle instruction {opcode!r}"
