"""Running a class's own code with some functions replaced: what is reached, what is not, and what stays untouched."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from sage_patch.integrations.intercept import rebound_methods


def replacement(*args):
    return "replaced"


def helper(x):
    return F.scaled_dot_product_attention(x, x, x)


def outer_helper(x):
    return helper(x)


class Direct:
    scale = 2

    def __call__(self, x, *, twice=True):
        return F.scaled_dot_product_attention(x, x, x), F.relu(torch.tensor(-1.0)).item(), twice

    def plain(self):
        return 1


class ThroughTorch:
    def __call__(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class ThroughHelper:
    def __call__(self, x):
        return helper(x)


class ThroughTwoHelpers:
    def __call__(self, x):
        return outer_helper(x)


class Nested:
    def __call__(self, x):
        return [F.scaled_dot_product_attention(x, x, x) for _ in range(2)]


class Child(Direct):
    scale = 3


class Decorated:
    @functools.lru_cache  # noqa: B019
    def __call__(self, x):
        return F.scaled_dot_product_attention(x, x, x)


REPLACEMENTS = {F.scaled_dot_product_attention: replacement}


def test_every_way_of_calling_by_name_is_reached():
    for cls in (ThroughTorch, ThroughHelper, ThroughTwoHelpers):
        assert rebound_methods(cls, REPLACEMENTS)["__call__"](cls(), 0) == "replaced"
    assert rebound_methods(Nested, REPLACEMENTS)["__call__"](Nested(), 0) == ["replaced"] * 2


def test_everything_else_of_the_function_stays():
    """Other functions of the same module, keyword defaults, names; methods that call nothing of it are left alone."""
    methods = rebound_methods(Child, REPLACEMENTS)
    assert list(methods) == ["__call__"]
    assert methods["__call__"](Child(), 0) == ("replaced", 0.0, True)
    assert methods["__call__"].__qualname__ == "Direct.__call__"


def test_the_original_and_its_module_are_untouched():
    before = dict(globals())
    rebound_methods(Direct, REPLACEMENTS)
    assert globals() == before
    x = torch.ones(1, 1, 2, 4)
    assert torch.equal(Direct()(x)[0], x)


def test_what_is_not_reached_gives_nothing():
    assert rebound_methods(Decorated, REPLACEMENTS) == {}
    assert rebound_methods(nn.Linear, REPLACEMENTS) == {}
