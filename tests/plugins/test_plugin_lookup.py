"""Drafters and verifiers found by name, and built from options."""

from __future__ import annotations

import plugin_site
import pytest
from plugin_site import Site, discover, offering

from specdec_core.contract.errors import AmbiguousPlugin, InvalidSpec, PluginError, UnknownPlugin, UsageError
from specdec_core.plugins.registry import BUILT_IN, Registry

site = plugin_site.site


def test_a_name_of_two_distributions_has_to_be_chosen_others_work(site: Site) -> None:
    """B98."""
    site.add("alpha", offering("medusa", "eagle"))
    site.add("beta", offering("medusa", "hydra"), version="2.0")
    found = discover()
    assert found.lines == []
    with pytest.raises(AmbiguousPlugin) as caught:
        found.registry.drafter("medusa")
    assert str(caught.value) == (
        "drafter 'medusa' is offered by alpha 1.0 and beta 2.0; write alpha/medusa or beta/medusa"
    )
    assert found.registry.drafter("alpha/medusa") is not found.registry.drafter("beta/medusa")
    assert found.registry.drafter("beta/medusa").__module__ == "beta_plugin"
    assert found.registry.drafter("eagle").name == "eagle"
    assert found.registry.drafter("hydra").name == "hydra"


def test_shadowing_a_built_in_is_no_way_to_replace_it(site: Site) -> None:
    """B98."""
    site.add("alpha", offering("small_model", verifiers=("greedy",)))
    registry = discover().registry
    with pytest.raises(AmbiguousPlugin, match=f"alpha 1.0 and {BUILT_IN} 0.1"):
        registry.build_drafter("small_model")
    with pytest.raises(AmbiguousPlugin, match=f"write alpha/greedy or {BUILT_IN}/greedy"):
        registry.verifier("greedy")
    assert registry.drafter(f"{BUILT_IN}/small_model").__module__ == "specdec_core_plugin"
    assert registry.drafter("prompt_lookup").name == "prompt_lookup"


def test_an_unknown_name_lists_the_nearest_the_known_and_the_failed(site: Site) -> None:
    """B99."""
    site.add("alpha", offering("medusa"))
    site.add("broken", "import nowhere_to_be_found\n", version="0.9")
    site.add("omega", offering("eagle"))
    registry = discover(blocked=["omega"]).registry
    with pytest.raises(UnknownPlugin) as caught:
        registry.drafter("medsua")
    assert str(caught.value) == (
        "no drafter 'medsua'; did you mean 'medusa'? known: medusa, prompt_lookup, small_model; "
        "failed to load: 'broken_plugin' of broken 0.9 "
        "(ModuleNotFoundError: No module named 'nowhere_to_be_found'); "
        "left out: 'omega_plugin' of omega 1.0 (left out by name)"
    )
    with pytest.raises(UnknownPlugin, match="did you mean 'alpha/medusa'"):
        registry.drafter("alpa/medusa")
    with pytest.raises(UnknownPlugin, match="no verifier 'gredy'; did you mean 'greedy'"):
        registry.verifier("gredy")
    with pytest.raises(UnknownPlugin, match="no drafter 'x'; known: none"):
        Registry().drafter("x")


@pytest.mark.parametrize("name", ["alpha", "alpha_plugin"])
def test_the_name_of_a_plugin_is_not_that_of_its_drafter_but_helps(site: Site, name: str) -> None:
    """B100."""
    site.add("alpha", offering("medusa", "eagle"))
    with pytest.raises(UnknownPlugin, match=f"{name} is a plugin and offers: medusa, eagle"):
        discover().registry.drafter(name)


def test_a_part_is_built_from_its_options(site: Site) -> None:
    registry = discover().registry
    assert registry.build_drafter("prompt_lookup", {"num_tokens": "7"}).config.model_dump() == {
        "num_tokens": 7
    }
    assert registry.build_drafter(f"{BUILT_IN}/prompt_lookup").config.model_dump() == {"num_tokens": 4}
    assert registry.build_verifier("greedy").name == "greedy"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": "1.9"}, "drafter 'medusa': num_tokens=1.9: input should be a valid integer"),
        ({"num_token": "3"}, "drafter 'medusa' has no option 'num_token' (=3); did you mean 'num_tokens'?"),
    ],
)
def test_a_wrong_option_is_one_line(site: Site, options: dict[str, str], message: str) -> None:
    site.add("alpha", offering("medusa"))
    with pytest.raises(InvalidSpec) as caught:
        discover().registry.build_drafter("medusa", options)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("options: num_tokens")


def constructor(body: str) -> str:
    return offering("medusa").replace("def __init__(self, config): self.config = config", body)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (constructor("def __init__(self, config): 1 / 0"), "ZeroDivisionError: division by zero"),
        (constructor("def __init__(self): ..."), "takes 1 positional argument but 2 were given"),
        (constructor("def __init__(self, config): ..."), "drafter 'medusa' of alpha 1.0 lacks config"),
        (
            offering("medusa").replace(
                'capabilities = "stand-in"', "capabilities = property(lambda self: 1 / 0)"
            ),
            "ZeroDivisionError: division by zero",
        ),
        (offering("medusa").replace('capabilities = "stand-in"', ""), "alpha 1.0 lacks capabilities"),
    ],
)
def test_a_fault_of_the_plugin_names_the_plugin(site: Site, text: str, message: str) -> None:
    module = site.add("alpha", text)
    with pytest.raises(PluginError) as caught:
        discover().registry.build_drafter("medusa")
    assert str(caught.value).startswith("drafter 'medusa' of alpha 1.0")
    assert message in str(caught.value)
    assert caught.value.entry_point == module


def test_a_user_error_of_a_plugin_is_shown_as_it_is(site: Site) -> None:
    """B101."""
    site.add("alpha", constructor("def __init__(self, config): raise UsageError('no heads in this folder')"))
    with pytest.raises(UsageError) as caught:
        discover().registry.build_drafter("medusa")
    assert str(caught.value) == "no heads in this folder"
