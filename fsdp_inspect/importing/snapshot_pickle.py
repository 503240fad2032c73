"""What does this pickle hold, if it may hold nothing but plain values?

A pickle is a program for a small machine. This machine knows the instructions that build None,
numbers, text, lists, tuples and dictionaries with text keys, of protocols 2 to 5; whatever would
look up a class or call something is refused by name. Nothing is ever imported or called.

It also pays for what it builds: each instruction adds what its result takes in memory, and a file
that would take more than the budget is refused before it has. Every instruction reads at least one
byte and takes constant time (or time that an earlier one paid for), so a file of n bytes ends after
n instructions at most. Keys are text, whose hashes an attacker cannot choose; nested values are
never hashed or compared.
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
"""What the values of one pickle may take in memory, as estimated below."""

FIRST_PROTOCOL, LAST_PROTOCOL = 2, 5

_MAX_INTEGER_BYTES = 16
_LONG_GETS = re.compile(rb"(?:j.{4})+", re.DOTALL)
_LONG_NUMBER = struct.Struct("<xI")
_REMEDY = "Dump the snapshot again with torch.cuda.memory._dump_snapshot."

# What CPython 3.11 takes on 64 bits, rounded up.
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
    """The value of a pickle that is made of plain values only.

    Args:
        data: The whole file, or a memory map of it.
        name: The file's name, for messages.
        max_memory_bytes: What the values may take in memory.

    Raises:
        CorruptFileError: It is cut off, damaged, too large, of another protocol, or asks for
            anything but plain values.
    """
    machine = _Machine(data, max_memory_bytes)
    try:
        return machine.run()
    except _Refusal as refusal:
        raise CorruptFileError(f"{name} {refusal}") from None
    except (IndexError, struct.error):
        raise CorruptFileError(
            f"{name} ends or breaks off at byte {machine.at} of {len(data)}. Expected a whole "
            f"pickle. Copy the file again from where it was written, or: {_REMEDY}"
        ) from None
    except (UnicodeDecodeError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise CorruptFileError(
            f"{name} is damaged at byte {machine.at} of {len(data)} "
            f"({type(error).__name__}: {reprlib.repr(str(error))}). Expected a pickle of "
            f"dictionaries, lists and numbers. {_REMEDY}"
        ) from None


def starts_like_pickle(head: bytes) -> bool:
    """Whether these first bytes are those of a pickle of protocol 2 to 5."""
    return head[:1] == pickle.PROTO and head[1:2] in (b"\2", b"\3", b"\4", b"\5")


class _Refusal(Exception):
    """What is wrong, as the rest of a sentence that begins with the file's name."""


class _Machine:
    """Runs the instructions of one pickle; see the module's docstring."""

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
        """The value on top when the program stops."""
        data, table, memo = self._data, self._table, self._memo
        get, stop = pickle.BINGET[0], pickle.STOP[0]
        if not starts_like_pickle(data[:2]):
            raise _Refusal(
                f"begins with {bytes(data[:4])!r}. Expected a pickle of protocol {FIRST_PROTOCOL} "
                f"to {LAST_PROTOCOL}, as torch writes snapshots. {_REMEDY}"
            )
        self._pay(_ITEM_BYTES * len(data))  # an instruction leaves one reference behind at most
        while True:
            at = self.at
            opcode = data[at]
            if opcode == get:  # by far the most frequent: keys, and the frames of stacks
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
                f"would take more memory than a snapshot may (at byte {self.at} of "
                f"{len(self._data)}). Expected at most a few million trace entries. Record fewer: "
                "torch.cuda.memory._record_memory_history(max_entries=100_000)."
            )

    # --- values

    def _push_constant(self, value: Any) -> None:
        self._stack.append(value)

    def _integer(self, size: int, *, is_signed: bool) -> None:
        if not 0 <= size <= _MAX_INTEGER_BYTES:
            raise _Refusal(
                f"holds an integer of {size} bytes. Expected sizes and addresses of at most 8. "
                f"{_REMEDY}"
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
        """What was remembered under numbers above 255; the frames of a stack follow each other."""
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

    # --- what holds values

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
            raise TypeError("items are added to something that is not a list")
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
            raise TypeError("keys are set on something that is not a dictionary")
        keys = items[::2]
        if not {*map(type, keys)} <= {str}:
            raise TypeError("a key of a dictionary is not text")
        target.update(zip(keys, items[1::2], strict=True))

    def _remember(self, index: int) -> None:
        self._pay(_MEMO_BYTES)
        self._memo[index] = self._stack[-1]

    # --- beginnings, and what is refused

    def _protocol(self) -> None:
        version = self._unpack("<B", 1)
        if not FIRST_PROTOCOL <= version <= LAST_PROTOCOL:
            raise _Refusal(
                f"is a pickle of protocol {version}. Expected {FIRST_PROTOCOL} to {LAST_PROTOCOL}. "
                f"{_REMEDY}"
            )

    def _frame(self) -> None:
        self.at += 8  # its length serves buffered readers only

    def _refuse_opcode(self) -> None:
        opcode = self._data[self.at - 1]
        raise _Refusal(
            f"asks for {self._describe(bytes([opcode]))} at byte {self.at - 1}. Expected "
            "dictionaries, lists, text and numbers only, as torch writes snapshots; nothing of it "
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
