"""A calculator: exact, without `eval`, and bounded.

sum     = product (("+" | "-") product)*
product = power (("*" | "/" | "//" | "%") power)*
power   = "-" power | atom ["**" power]
atom    = number | "(" sum ")"
"""

from __future__ import annotations

import re
from fractions import Fraction

from courtside.environments.toolbox.tools.base import ToolFailure

MAX_LENGTH, MAX_DEPTH, MAX_BITS = 200, 30, 512
TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(\*\*|//|[-+*/%()^×÷−])|(\S))")
SAME = {"^": "**", "×": "*", "÷": "/", "−": "-"}


def evaluate(expression: str) -> Fraction:
    """Raises ToolFailure for what is no arithmetic, and for results beyond 512 bits."""
    if len(expression) > MAX_LENGTH:
        raise ToolFailure(f"expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    if parser.next:
        raise ToolFailure(f"unexpected '{parser.next}'")
    return value


def format_fraction(value: Fraction) -> str:
    """A whole number in full, otherwise six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    text = f"{float(value):.6f}".rstrip("0").rstrip(".")
    return f"{float(value):.6g}" if text in ("0", "-0") else text


def _tokens(expression: str) -> list[str]:
    tokens = []
    for number, operator, other in TOKEN.findall(expression):
        if other:
            raise ToolFailure(f"unexpected '{other}'")
        tokens.append(number or SAME.get(operator, operator))
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self) -> str:
        token = self.next
        self._position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            plus = self._take() == "+"
            other = self._product(depth)
            value = _bounded(value + other if plus else value - other)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._power(depth)
        while self.next in ("*", "/", "//", "%"):
            operator = self._take()
            value = _bounded(_multiplied(value, operator, self._power(depth)))
        return value

    def _power(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ToolFailure("expression is nested too deeply")
        if self.next in ("-", "+"):
            sign = -1 if self._take() == "-" else 1
            return sign * self._power(depth + 1)
        base = self._atom(depth)
        if self.next != "**":
            return base
        self._take()
        return _raised(base, self._power(depth + 1))

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ToolFailure("missing ')'")
            return value
        if not token:
            raise ToolFailure("expression ends too early")
        if token[0] not in ".0123456789":
            raise ToolFailure(f"unexpected '{token}'")
        return _bounded(Fraction(f"0{token}"))


def _multiplied(first: Fraction, operator: str, second: Fraction) -> Fraction:
    if operator == "*":
        return first * second
    if second == 0:
        raise ToolFailure("division by zero")
    if operator == "/":
        return first / second
    return Fraction(first // second) if operator == "//" else first % second


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolFailure("only whole exponents are supported")
    if base == 0 and exponent < 0:
        raise ToolFailure("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Before it is computed: 9**9**9 would have 370 million digits.
    if size > 1 and (size - 1) * abs(exponent.numerator) > MAX_BITS:
        raise ToolFailure("result is too large")
    if size <= 1:  # 0, 1 and -1: the exponent's size does not matter, its parity does
        even = exponent.numerator % 2 == 0
        return Fraction(1) if exponent == 0 or (base == -1 and even) else base
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolFailure("result is too large")
    return value
