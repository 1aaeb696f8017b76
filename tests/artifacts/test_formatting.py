"""Numbers with significant digits, and command lines."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from solrl_lightning.artifacts.formatting import (
    change,
    measured,
    number,
    numbers,
    path_option,
    shell_quoted,
    two_decimals,
)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (number(0.4321), "0.4321"),
        (number(12345.67), "12,346"),
        (number(8.70333e29), "8.703e+29"),
        (number(1.234e-7), "1.234e-07"),
        (number(0.0), "0.0000"),
        (number(None), "-"),
        (number(float("nan")), "nan"),
        (" ".join(numbers([0.34, 0.346, None], 3)), "0.340 0.346 -"),
        (" ".join(two_decimals(0.344, 1)), "0.34 1.00"),
        (" ".join(two_decimals(0.00356, 0.00379)), "0.0036 0.0038"),
        (" ".join(two_decimals(0, None)), "0.00 -"),
        (measured(0.5404, 0.0182), "0.540 ± 0.018"),
        (measured(-0.0073, 0.0053, signed=True), "-0.0073 ± 0.0053"),
        (measured(0.5, 0.0), "0.5000"),
        (change(0.5, 0.5488, None), "+0.0488"),
        (change(-0.105438, -0.105402, None), "+0.000036"),
        (change(0.5, 0.5, None), "+0.0000"),
        (change(0.5, 0.6, 0.02), "+0.100 ± 0.020"),
    ],
)
def test_numbers_have_significant_digits(actual: str, expected: str) -> None:
    assert actual == expected


@pytest.mark.parametrize("argument", ["a=1", "a=[b,c]", "ckpt='/a b'", "a='b' \"c\"", "a='$b'", "a='`b`'"])
def test_an_argument_survives_the_shell(argument: str) -> None:
    assert shlex.split(shell_quoted(argument)) == [argument]
    assert "'\"'\"'" not in shell_quoted("ckpt='<file>'")


@pytest.mark.parametrize("path", ["/a/b.ckpt", "/tmp/ümlaut", "a b", "x(1)", "it's", "a,b=[c]", "~a", "$HOME", '"'])
def test_a_path_survives_the_shell_and_hydra(path: str) -> None:
    (argument,) = shlex.split(path_option("ckpt", path))
    assert OverridesParser.create().parse_override(argument).value() == path
