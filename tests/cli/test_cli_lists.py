"""`specdec drafters`, `verifiers` and `plugins`, also where a plugin is broken."""

from __future__ import annotations

import json
from pathlib import Path

import cli_support
import plugin_site
import pytest
from cli_support import cli, error_of, objects, process, said
from plugin_site import Site, offering
from pydantic import BaseModel, Field

from specdec_core import DraftLaw
from specdec_core.cli.fields import describe_fields

model = cli_support.model
site = plugin_site.site


# --- drafters and verifiers -----------------------------------------------------------------------


def test_the_drafters_there_are() -> None:
    lines = said("drafters").splitlines()
    assert lines[0].split() == ["name", "distribution", "shape", "laws"]
    at = next(i for i, line in enumerate(lines) if line.startswith("prompt_lookup "))
    assert lines[at].split() == ["prompt_lookup", "specdec-core", "chains", "ONE_HOT"]
    assert lines[at + 1].startswith("    Draft the continuation of an earlier occurrence")
    assert all(line == line.rstrip() for line in lines)


def test_the_verifiers_there_are() -> None:
    lines = said("verifiers").splitlines()
    assert lines[0].split() == ["name", "distribution", "shape", "samples", "lossless", "laws"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1::2]}
    assert rows["greedy"] == ["specdec-core", "trees", "no", "yes", "all"]
    assert rows["match"] == ["specdec-core", "trees", "yes", "yes", "all"]
    assert rows["rejection"][-3:] == ["all", "but", "COUPLED"]


def test_lists_as_json() -> None:
    drafters = {one["name"]: one for one in objects("drafters")}
    assert drafters["prompt_lookup"] | {"version": "?", "description": "?"} == {
        "name": "prompt_lookup",
        "distribution": "specdec-core",
        "version": "?",
        "laws": ["ONE_HOT"],
        "shape": "chains",
        "depth": 20,
        "description": "?",
    }
    verifiers = {one["name"]: one for one in objects("verifiers")}
    assert verifiers["greedy"]["laws"] == [law.name for law in DraftLaw]
    assert (verifiers["greedy"]["samples"], verifiers["greedy"]["lossless"]) == (False, True)


def test_show_describes_one_and_every_option() -> None:
    text = said("drafters", "show", "prompt_lookup")
    assert text.startswith("prompt_lookup: drafter of specdec-core ")
    assert "Prompt and output are searched." in text
    assert "--drafter prompt_lookup:OPTION=VALUE" in text
    options = [line.split(maxsplit=4) for line in text.splitlines()[-3:]]
    assert ["max_ngram", "int", ">=", "1", "3        longest suffix to look for"] in options
    assert said("drafters", "show", "specdec-core/prompt_lookup") == text
    assert said("verifiers", "show", "greedy").endswith("It takes no options.\n")


def test_show_as_json() -> None:
    found = objects("drafters", "show", "prompt_lookup")
    assert "Prompt and output are searched." in found["description"]
    assert {option["option"]: option for option in found["options"]}["max_ngram"] == {
        "option": "max_ngram",
        "type": "int >= 1",
        "default": 3,
        "required": False,
        "description": "longest suffix to look for",
    }


def test_an_unknown_name_is_one_line() -> None:
    assert error_of("drafters", "show", "promt_lookup").startswith(
        "no drafter 'promt_lookup'; did you mean 'prompt_lookup'? known: "
    )
    assert error_of("verifiers", "show", "nix").startswith("no verifier 'nix'; known: ")


def test_options_of_every_kind_in_words() -> None:
    from enum import Enum
    from typing import Annotated, Literal

    class Colour(Enum):
        RED = "red"
        BLUE = "blue"

    class Config(BaseModel):
        needed: str
        share: float = Field(0.5, gt=0, le=1, description="of all")
        kind: Literal["a", "b"] = "a"
        colour: Colour = Colour.RED
        folder: Path | None = None
        names: list[str] = Field(default_factory=list)
        layer: Annotated[int, Field(ge=1)] | None = None
        renamed: bool = Field(True, alias="flag")

    found = {option["option"]: (option["type"], option["default"]) for option in describe_fields(Config)}
    assert found == {
        "needed": ("text", None),
        "share": ("float > 0, <= 1", 0.5),
        "kind": ("a | b", "a"),
        "colour": ("red | blue", "red"),
        "folder": ("Path", None),
        "names": ("list[str]", []),
        "layer": ("int", None),
        "flag": ("bool", True),
    }
    assert [option["option"] for option in describe_fields(Config) if option["required"]] == ["needed"]


# --- distributions that are not ours --------------------------------------------------------------


def test_a_drafter_that_needs_an_option_is_listed(site: Site) -> None:
    site.add("alpha", offering("medusa").replace("num_tokens: int = 4", "heads: str"))
    rows = {line.split()[0]: line.split()[1:] for line in said("drafters").splitlines()}
    assert rows["medusa"] == ["alpha", "by", "options", "by", "options"]
    assert "heads   text  required" in said("drafters", "show", "medusa")


def test_a_name_that_two_use_is_listed_twice_and_needs_the_distribution(site: Site) -> None:
    site.add("alpha", offering("medusa"))
    site.add("beta", offering("medusa"))
    assert [one["distribution"] for one in objects("drafters") if one["name"] == "medusa"] == [
        "alpha",
        "beta",
    ]
    assert "write alpha/medusa or beta/medusa" in error_of("drafters", "show", "medusa")
    assert objects("drafters", "show", "beta/medusa")["distribution"] == "beta"


def test_what_a_plugin_prints_does_not_reach_stdout(site: Site) -> None:
    site.add("alpha", offering("medusa", more="print('hello')"))
    done = cli("plugins", "--json")
    assert done.stderr == "hello\n"
    assert len(json.loads(done.stdout)) == 2


def test_plugins_shows_where_each_comes_from_and_what_it_offers(site: Site) -> None:
    site.add("alpha", offering("medusa", verifiers=("typical",)), version="2.1")
    site.add("broken", "1 / 0\n")
    done = cli("plugins")
    assert done.exit_code == 0
    assert done.stderr.startswith("specdec: skipped plugin 'broken_plugin' of broken 1.0: ZeroDivisionError")
    assert done.stderr.count("\n") == 1
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["name", "distribution", "version", "status"]
    assert lines[1].split() == ["alpha_plugin", "alpha", "2.1", "loaded"]
    assert lines[2:5] == [
        "    drafters: medusa",
        "    verifiers: typical",
        f"    origin: {site.folder / 'alpha_plugin.py'}",
    ]
    assert lines[5].split() == ["broken_plugin", "broken", "1.0", "failed"]
    assert lines[6] == "    error: ZeroDivisionError: division by zero"


def test_a_strict_environment_fails_with_the_reason(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("broken", "1 / 0\n")
    monkeypatch.setenv("SPECDEC_STRICT_PLUGINS", "1")
    assert "plugin 'broken_plugin' of broken 1.0: ZeroDivisionError" in error_of("plugins", code=1)


# --- broken plugins, in a process of its own ------------------------------------------------------

SEVERAL = """
import sys
from specdec_core.cli.app import command
for args in [["--help"], ["plugins", "--json"], ["run", "--target", sys.argv[1], "-p", "a", "-n", "3"]]:
    try:
        command().main(args, prog_name="specdec")
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            print(f"ended with {end.code}", file=stream, flush=True)
"""


def test_beside_broken_plugins_everything_works_with_one_line_each(tmp_path: Path, model: str) -> None:
    site = Site(tmp_path)
    site.add("exiting", "import sys\nsys.exit(3)\n", version="0.9")
    site.add("half", offering("half").replace("register(drafter_half)", "register(drafter_half); 1 / 0"))
    site.add("whole", offering("whole"))
    done = process(model, code=SEVERAL, PYTHONPATH=str(tmp_path))
    _, plugins, text, _ = done.stdout.split("ended with 0\n")
    assert text == "bcd\n"

    skipped = (
        "specdec: skipped plugin 'exiting_plugin' of exiting 0.9: SystemExit: 3\n"
        "specdec: skipped plugin 'half_plugin' of half 1.0: ZeroDivisionError: division by zero\n"
    )
    helping, listing, running, _ = done.stderr.split("ended with 0\n")
    assert helping == ""
    assert listing == skipped
    assert running.startswith(f"{skipped}specdec: prompt_lookup / greedy / k=auto")
    assert running.count("\n") == 3

    found = {plugin["distribution"]: plugin for plugin in json.loads(plugins)}
    assert found["exiting"] == {
        "name": "exiting_plugin",
        "distribution": "exiting",
        "version": "0.9",
        "origin": "exiting_plugin",
        "status": "failed",
        "error": "SystemExit: 3",
        "drafters": [],
        "verifiers": [],
    }
    assert (found["half"]["status"], found["half"]["drafters"]) == ("failed", [])
    assert (found["whole"]["status"], found["whole"]["drafters"]) == ("loaded", ["whole"])
    assert found["specdec-core"]["status"] == "loaded"
