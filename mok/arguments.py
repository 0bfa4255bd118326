"""Checks of one argument at a time: each raises a ValueError that begins with the argument's name. Used wherever a user's value comes in."""
from __future__ import annotations

import errno
import math
import os
import stat
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LARGEST = 2**31 - 1       # of a count or a size: what int32 indices and every library's own sizes can hold
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kind_of(value: Any) -> str:
    """How an error calls a wrong value: numbers and strings that are short and None as they stand, everything else by its type."""
    if isinstance(value, int) and value.bit_length() > 256:      # Python refuses to print very long ones
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if value is None or (isinstance(value, (str, int, float)) and len(repr(value)) <= 200) else type(value).__name__


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    """ValueError unless `value` is an int (no bool, no float) of at least `least` and at most `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={kind_of(value)} must be an integer" + ("" if least is None else f" of at least {least}"))
    if least is not None and value < least:
        raise ValueError(f"{name}={kind_of(value)} must be at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name}={kind_of(value)} must be at most {most}")


def check_number(name: str, value: Any, *, positive: bool = False, finite: bool = True) -> None:
    """ValueError unless `value` is a real number, no NaN and no bool, of at least 0, and with `positive` above it."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.nan
        if (number > 0 or (number == 0 and not positive)) and (number < math.inf or not finite):
            return
    what = "a positive number" if positive else "a number of at least 0"
    raise ValueError(f"{name}={kind_of(value)} must be {what}")


def check_bool(name: str, value: Any) -> None:
    """ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={kind_of(value)} must be True or False")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """ValueError unless `value` is one of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={kind_of(value)} must be one of {choices}")


def check_type(name: str, value: Any, kind: Any, what: str) -> None:
    """ValueError unless isinstance(value, kind); what: how the message calls it, "a mok.Overlap or None"."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={kind_of(value)} must be {what}")


def check_seconds(name: str, value: Any) -> None:
    """ValueError unless `value` is a positive number of seconds that a clock can count."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= LARGEST:
        raise ValueError(f"{name}={kind_of(value)} must be a positive number of seconds, at most {LARGEST}")


def check_device(name: str, value: Any) -> torch.device | None:
    """The device; ValueError unless it is None or what torch takes for one. Whether it is there, it does not say."""
    try:
        return None if value is None else torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"{name}={kind_of(value)} must be None or a device that torch knows, such as 'cpu' or 'cuda:0'") from None


def check_tensor(name: str, value: Any) -> None:
    """ValueError unless `value` is a tensor with ordinary (strided) storage."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}={type(value).__name__} must be a tensor")
    if value.is_nested:
        raise ValueError(f"{name} is a nested tensor and must be an ordinary one")
    if value.layout is not torch.strided:
        raise ValueError(f"{name}.layout={value.layout} must be torch.strided")


def check_path(name: str, value: Any) -> Path:
    """The path; ValueError unless it is text (or an os.PathLike of it) that can be a file's name. Whether there is a file, it does not say."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{name}={kind_of(text)} must be the path of a file or folder")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno not in _NOT_THERE:                        # too long a name, a folder that may not be searched, a loop of links
            raise ValueError(f"{name}={kind_of(text)} must be a path that can be used: {error.strerror}") from None
    except ValueError:                                           # characters that the file system's encoding lacks
        raise ValueError(f"{name}={text!r} must be a path that can be used") from None
    return Path(text)


def check_readable_file(name: str, value: Any, *, pipe: bool = False) -> Path:
    """The path; ValueError naming it where it is a device, a socket or (unless `pipe`) a pipe: those may never end, or be read only once."""
    path = check_path(name, value)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise ValueError(f"{name}={str(path)!r} cannot be read: {error.strerror}") from None
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (pipe and stat.S_ISFIFO(mode))):
        raise ValueError(f"{name}={str(path)!r} must be a regular file: it is a device, a pipe or a socket")
    return path
