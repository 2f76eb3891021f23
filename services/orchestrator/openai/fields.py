"""Reading a JSON object field by field: each is checked, and what nobody asked for is refused by name."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from services.orchestrator.openai.errors import HttpError, refused
from services.speculation.errors import AerieError

_KINDS = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class Fields:
    """The fields of one object. ``null`` is a field that is not there.

    Args:
        values: The object.
        path: Where it stands in the body, for messages: "" or like ``messages[0].``.

    Every method raises HttpError (400) with the field's name.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def take(self, name: str) -> Any:
        """The value, whatever it is; None when it is not there."""
        return self._left.pop(name, None)

    def string(self, name: str) -> str | None:
        value: str | None = self._typed(name, str)
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self._typed(name, bool)
        return default if value is None else bool(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self._typed(name, int)
        if value is not None and not least <= value <= most:
            self.refuse(name, f"{name} must be from {least} to {most}, not {value}")
        return None if value is None else int(value)

    def array(self, name: str) -> list[Any] | None:
        value: list[Any] | None = self._typed(name, list)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(name, dict)
        return value

    def end(self, unsupported: Mapping[str, Any]) -> None:
        """Nothing may be left.

        Args:
            unsupported: Fields that OpenAI has and we do not, and the value that asks for nothing, or None.
        """
        for name, value in self._left.items():
            if name not in unsupported:
                self._fail(name, f"there is no parameter {self._path}{name}", "unknown_parameter")
            neutral = unsupported[name]
            if type(value) is not type(neutral) or value != neutral:
                self._fail(name, f"{self._path}{name} is not supported", "unsupported_parameter")

    def need(self, name: str) -> NoReturn:
        self._fail(name, f"{self._path}{name} is missing", "missing_required_parameter")

    def refuse(self, name: str, message: str) -> NoReturn:
        self._fail(name, message, "invalid_value")

    @contextlib.contextmanager
    def blamed(self, name: str) -> Iterator[None]:
        """What our own checks refuse inside is this field's fault."""
        try:
            yield
        except AerieError as error:
            raise refused(error, self._path + name) from None

    def _typed(self, name: str, kind: type[Any]) -> Any:
        value = self._left.pop(name, None)
        if value is not None and type(value) is not kind:
            message = f"{self._path}{name} must be {_KINDS[kind]}, not {_KINDS[type(value)]}"
            self._fail(name, message, "invalid_type")
        return value

    def _fail(self, name: str, message: str, code: str) -> NoReturn:
        raise HttpError(400, message, code, self._path + name)
