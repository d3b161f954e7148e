"""JSON as people write it into configuration files: a superset that DeepSpeed accepts too.

    # comment   // comment   /* comment */
    key: value               quotes around names and one-line texts may be missing,
    "other": [1, 2,],        commas at the end of a line too, and the outer braces

Names that occur twice in one object are an error.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from offload.errors import ConfigError

_BLANK = re.compile(r"(?:[\s,]|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.S)
_NAME = re.compile(r'[^\s,:\[\]{}"\'#/]+')
_LITERALS = {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")


def loads(text: str, name: str = "config") -> dict[str, Any]:
    """The object that `text` holds; raises ConfigError with line and column."""
    try:
        return _Reader(text.removeprefix("\ufeff"), name).document()
    except RecursionError:
        raise ConfigError(f"{name}: expected settings, got brackets nested too deeply.") from None


class _Reader:
    """A cursor over one text."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._at = 0

    def document(self) -> dict[str, Any]:
        self._skip()
        if self._here() == "{":
            found = self._object()
        elif self._here() == "[":
            self._fail("an object of settings")
        else:
            found = self._members("")
        self._skip()
        if self._here():
            self._fail("the end of the text")
        return found

    def _here(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self) -> None:
        """Pass blanks, commas and comments."""
        found = _BLANK.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _value(self) -> Any:
        self._skip()
        here = self._here()
        if here == "{":
            return self._object()
        if here == "[":
            return self._list()
        if here and here in "\"'":
            return self._quoted()
        return self._bare()

    def _object(self) -> dict[str, Any]:
        self._at += 1
        found = self._members("}")
        self._at += 1
        return found

    def _members(self, end: str) -> dict[str, Any]:
        """Names and values up to `end`, which is not passed."""
        found: dict[str, Any] = {}
        while True:
            self._skip()
            if self._here() == end:
                return found
            start = self._at
            key = self._key()
            self._skip()
            if self._here() != ":":
                self._fail(f"':' after {key!r}")
            self._at += 1
            value = self._value()
            if key in found:
                self._at = start
                self._fail(f"{key!r} once", "it twice", "Remove one of the two.")
            found[key] = value

    def _key(self) -> str:
        here = self._here()
        if here and here in "\"'":
            return self._quoted()
        found = _NAME.match(self._text, self._at)
        if found is None:
            self._fail("a name in quotes")
        self._at = found.end()
        return found.group()

    def _list(self) -> list[Any]:
        self._at += 1
        found: list[Any] = []
        while True:
            self._skip()
            if self._here() == "]":
                self._at += 1
                return found
            if not self._here():
                self._fail("']'")
            found.append(self._value())

    def _quoted(self) -> str:
        quote = self._here()
        if self._text.startswith("'''", self._at):
            end = self._text.find("'''", self._at + 3)
            if end < 0:
                self._fail("''' at the end of a text")
            lines, self._at = self._text[self._at + 3 : end], end + 3
            return lines.strip("\n")
        found = re.compile(rf"{quote}((?:[^{quote}\\\n]|\\.)*){quote}").match(self._text, self._at)
        if found is None:
            self._fail(f"a closing {quote}")
        inner = found[1] if quote == '"' else found[1].replace("\\'", "'").replace('"', '\\"')
        try:
            text: str = json.loads(f'"{inner}"', strict=False)
        except ValueError:
            self._fail("a text with valid escapes")
        self._at = found.end()
        return text

    def _bare(self) -> Any:
        """A number, true, false, null; or text without quotes, which ends with its line."""
        stop = re.compile(r"[,\]}\n]|\s#|\s//|\s/\*|$").search(self._text, self._at)
        assert stop is not None
        word = self._text[self._at : stop.start()].strip()
        if not word or word[0] in "{[:" or '"' in word:
            self._fail("a value")
        self._at = stop.start()
        if word in _LITERALS:
            return _LITERALS[word]
        return json.loads(word) if _NUMBER.fullmatch(word) else word

    def _fail(self, expected: str, got: str = "", advice: str = "Correct the text.") -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - self._text.rfind("\n", 0, self._at)
        here = self._here()
        got = got or (repr(here) if here else "the end")
        raise ConfigError(
            f"{self._name}, line {line}, column {column}: expected {expected}, got {got}. {advice}"
        )
