"""Structured output with a real model: every finished answer matches what was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError
from chairlift.core.structured import Structured
from chairlift.text.grammar import Grammars, source_of
from chairlift.text.tokenizer import Tokenizer
from mostly_long import mostly_long
from schemas import UNSUPPORTED, check, corpus
from tiny import make_tiny_model

CORPUS = corpus()
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("structured") / "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), progress=False, max_sequences=64) as made:
        yield made


def tags(schema: dict[str, Any]) -> dict[str, Any]:
    """Free text in which each <f is followed by a value of the schema."""
    return {"structural_tag": {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}]}}


def check_all(llm: LLM, schemas: list[dict[str, Any]], prompt: list[int] = PROMPT, **params: Any) -> int:
    """Answer under each schema, check the finished answers and return how many there are."""
    asked = [SamplingParams(structured={"json": schema}, **params) for schema in schemas]
    finished = 0
    for schema, output in zip(schemas, llm.generate([prompt] * len(schemas), asked, progress=False), strict=True):
        for answer in output.outputs:
            assert answer.error is None
            if answer.finish_reason == "stop":
                finished += 1
                check(answer.text, schema)
    pool = llm.engine.scheduler.pool
    assert pool.available == pool.total
    return finished


def test_the_corpus_is_large_and_valid() -> None:
    assert len(CORPUS) >= 300
    for schema in CORPUS:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)


@pytest.mark.parametrize(
    "params",
    mostly_long([{"temperature": 1.0, "seed": 3}, {"temperature": 0}, {"temperature": 2.0, "seed": 4}]),
    ids=str,
)
def test_answers_match_every_schema_of_the_corpus(llm: LLM, params: dict[str, Any]) -> None:
    """A model with random weights writes anything that the grammar allows."""
    assert check_all(llm, CORPUS, max_tokens=400, **params) > 0.8 * len(CORPUS)


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_match_with_speculation(model: Path, temperature: int) -> None:
    """Drafts that a grammar forbids are not accepted, and those that it allows leave it in the right state."""
    with LLM(str(model), progress=False, max_sequences=32, speculation="ngram", fixed_drafts=3) as drafting:
        schemas = CORPUS[temperature::6]
        assert check_all(drafting, schemas, max_tokens=300, temperature=temperature, seed=2) > 0.8 * len(schemas)
        speculation = drafting.engine.scheduler.planner.speculation
        assert speculation is not None and sum(speculation.counts.accepted) > 20


@pytest.mark.parametrize("overlap", mostly_long([True, False]), ids=["overlapped", "sync"])
@pytest.mark.parametrize(
    "more",
    mostly_long(
        [
            {"n": 3, "logprobs": 2},
            {"prompt_logprobs": 1, "repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"top_k": 5, "min_p": 0.01, "best_of": 2},
            {"logit_bias": {40: 5.0}, "min_tokens": 3},
        ],
        2,
    ),
    ids=str,
)
def test_with_other_parameters_and_preemptions(model: Path, overlap: bool, more: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"max_sequences": 16, "max_length": 400, "kv_tokens": 400, "step_tokens": 32}
    with LLM(str(model), progress=False, overlap=overlap, **settings) as small:
        assert check_all(small, CORPUS[::15], [*range(20, 50)], max_tokens=300, temperature=1, seed=5, **more) > 10
        assert small.engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize(
    ("structured", "expected"),
    [
        ({"regex": r"[a-c]{2,4}-\d"}, r"[a-c]{2,4}-\d"),
        ({"choice": ["yes", "no", "может быть"]}, r"yes|no|может быть"),
        ({"grammar": 'start: "a" inner? "z"\ninner: /[0-9]/ | "(" inner ")"'}, r"a\(*\d?\)*z"),
        ({"grammar": 'root ::= "x" [0-9] [0-9]'}, r"x\d\d"),
        ({"json_object": True}, r"(?s)\{.*\}"),
        (Structured("regex", "k+"), r"k+"),
    ],
    ids=str,
)
def test_other_kinds(llm: LLM, structured: Any, expected: str) -> None:
    params = SamplingParams(structured=structured, temperature=1, seed=1, n=4, max_tokens=200)
    [output] = llm.generate([PROMPT], params, progress=False)
    finished = [answer for answer in output.outputs if answer.finish_reason == "stop"]
    assert finished or "json_object" in str(structured)
    for answer in finished:
        assert re.fullmatch(expected, answer.text), answer.text


def test_thousands_of_choices_are_one_token_of_the_grammar(llm: LLM) -> None:
    choices = [f"option {number}" for number in range(4000)]
    params = SamplingParams(structured={"choice": choices}, temperature=1, seed=1, n=3, max_tokens=40)
    [output] = llm.generate([PROMPT], params, progress=False)
    assert {answer.text for answer in output.outputs} < set(choices)


def test_structural_tags_constrain_what_follows_a_trigger(llm: LLM) -> None:
    tags = {"triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": {"enum": [1, 2]}, "end": "</f>"}]}
    params = SamplingParams(structured={"structural_tag": tags}, temperature=1, seed=1, n=4, max_tokens=60)
    [output] = llm.generate([PROMPT], params, progress=False)
    for answer in output.outputs:
        assert re.sub(r"<f=x>\s*[12]\s*</f>", "", answer.text).count("<f") == 0 or answer.finish_reason == "length"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"type": "array", "items": {"properties": {"a": {"const": 1}}, "type": "object"}, "maxItems": 2, "minItems": 1},
    ],
    ids=str,
)
def test_only_named_properties_are_written_unless_others_are_allowed(llm: LLM, schema: dict[str, Any]) -> None:
    params = SamplingParams(structured={"json": schema}, temperature=1, seed=1, n=8, max_tokens=200)
    [output] = llm.generate([PROMPT], params, progress=False)
    found = [json.loads(answer.text) for answer in output.outputs if answer.finish_reason == "stop"]
    assert len(found) > 4
    for each in found:
        assert all(part.keys() <= {"a"} for part in (each if isinstance(each, list) else [each]))


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"properties": {"a": {"type": "boolean"}}, "additionalProperties": {"const": 1}}, r'{"a":true,"\u0061":1}'),
        ({"patternProperties": {"^a": {"const": 1}}, "additionalProperties": {"const": 2}}, r'{"\u0061":2}'),
    ],
    ids=str,
)
def test_an_escaped_name_does_not_count_as_another_one(model: Path, schema: dict[str, Any], wrong: str) -> None:
    tokenizer = Tokenizer.from_folder(model)
    source = source_of(Structured.of({"json": {"type": "object", **schema}}))
    grammar = Grammars(tokenizer, tokenizer.vocab_size, [0]).constraint(source).matcher
    right = wrong.replace("\\u0061", "b")
    for text, is_whole in ((right, True), (wrong, False)):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert (grammar.deep_copy().try_consume_tokens(tokens) == len(tokens)) is is_whole, text


def test_a_grammar_that_is_too_complex_for_its_first_tokens_is_refused_before_it_runs(llm: LLM) -> None:
    rules = range(3000)
    grammar = "\n".join(["start: " + " ".join(f"r{each}" for each in rules), *(f'r{each}: "x"*' for each in rules)])
    with pytest.raises(RequestError, match="the grammar is too complex: Parser Error: Current row has"):
        llm.generate([PROMPT], structured={"grammar": grammar}, progress=False)


def test_a_schema_of_too_many_levels_is_refused(llm: LLM) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(180):
        schema = {"type": "object", "properties": {f"level {level}": schema}}
    with pytest.raises(RequestError, match="structured: json cannot be used: recursion limit exceeded"):
        llm.generate([PROMPT], structured={"json": schema}, progress=False)


def test_parts_that_are_joined_do_not_forbid_one_another(llm: LLM) -> None:
    parts = [{"properties": {name: {"type": "boolean"}}, "required": [name], "type": "object"} for name in "ab"]
    params = SamplingParams(structured={"json": {"allOf": parts, "maxProperties": 2}}, seed=1, n=4, max_tokens=200)
    [output] = llm.generate([PROMPT], params, progress=False)
    finished = [answer for answer in output.outputs if answer.finish_reason == "stop"]
    assert finished and all(json.loads(answer.text).keys() == {"a", "b"} for answer in finished)


def test_a_class_with_a_schema_is_taken(llm: LLM) -> None:
    class Person:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}

    [output] = llm.generate([PROMPT], structured=Person, progress=False)
    assert Structured.of(Person).kind == "json"
    assert output.outputs[0].text.lstrip().startswith("{")


@pytest.mark.parametrize(("schema", "path"), UNSUPPORTED, ids=[path for _, path in UNSUPPORTED])
def test_what_cannot_be_enforced_is_refused_with_its_path(llm: LLM, schema: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"(at {path})")):
        llm.generate([PROMPT], structured={"json": schema}, progress=False)


@pytest.mark.parametrize(
    ("structured", "why"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": ""}, "not empty"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"choice": []}, "list of strings"),
        ({"choice": ["a", 1]}, "each must be a string"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": [1]}, "which is an object"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than maximum"),
        ({"json": {"type": "object"}, "regex": "a"}, "give one of"),
        ({"yaml": "a"}, "give one of"),
        ({"json": {"enum": ["x" * 300_000]}}, "at most 262,144"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "lists of structures"),
        (7, "give one of"),
        ({"json": {"properties": {"a": {"multipleOf": 55560885}}}}, r"at #/properties/a/multipleOf"),
        ({"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, r"common multiple .* \(at #/allOf/1/mul"),
        ({"json": {"multipleOf": 997, "anyOf": [{"multipleOf": 0.991}]}}, "common multiple of at most 4 digits"),
        ({"json": {"allOf": [{"items": {"multipleOf": 97}}, {"items": {"multipleOf": 997}}]}}, "common multiple"),
        ({"json": {"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": {"multipleOf": 991}}}}, "common multiple"),
        ({"json": {"$ref": "#/x/y", "x": {"y": {"multipleOf": 55560885}}}}, r"at #/x/y/multipleOf"),
        ({"json": {"$ref": "#/x/0", "x": [{"type": "object", "minProperties": 5}]}}, r"at #/x/0/minProperties"),
        (tags({"multipleOf": 55560885}), r"at #/multipleOf"),
        ({"grammar": 'start: "a" part\npart: %json\n{"multipleOf": 55560885}'}, r"at #/multipleOf"),
        ({"grammar": 'start: %lark { start: %json {"type": "object", "minProperties": 5}\n}'}, r"at #/minProperties"),
        ({"grammar": ' {"grammars": [{"json_schema": {"multipleOf": 55560885}}]}'}, "grammar is JSON: give a grammar"),
        ({"regex": r"a[^\s\S]"}, "regex cannot be used: no token can come next, so that nothing can match$"),
        (tags({"type": "object", "minProperties": 5}), r"at #/minProperties"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(llm: LLM, structured: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as error:
        llm.generate([PROMPT], SamplingParams(structured=structured), progress=False)
    assert "\n" not in str(error.value)


def test_beams_are_refused() -> None:
    with pytest.raises(RequestError, match="does not support structured"):
        SamplingParams(use_beam_search=True, best_of=2, temperature=0, structured={"regex": "a"})


def test_rules_that_leave_no_token_are_the_requests_error(llm: LLM) -> None:
    """The grammar wants digits, and the only tokens allowed are others."""
    tokenizer = llm.get_tokenizer()
    letters = tokenizer.encode("z", add_special_tokens=False)
    params = SamplingParams(structured={"regex": "[0-9]+"}, allowed_token_ids=letters)
    [failed, fine] = llm.generate([PROMPT, PROMPT], [params, SamplingParams(max_tokens=5)], progress=False)
    assert failed.error == "no token is left to choose under allowed_token_ids and structured: allow more tokens"
    assert fine.error is None


def test_tools_and_calls_in_process(llm: LLM) -> None:
    add = {"type": "function", "function": {"name": "add", "parameters": CORPUS_TOOL}}
    talk = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=1, seed=2, max_tokens=300)
    [output] = llm.chat(talk, params, tools=[add], tool_choice="required", parallel_tool_calls=False, progress=False)
    [message] = output.messages
    assert [call.name for call in message.calls] == ["add"]
    jsonschema.validate(json.loads(message.calls[0].arguments), CORPUS_TOOL)
    history = [
        *talk,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": message.calls[0].arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    [output] = llm.chat(history, SamplingParams(max_tokens=5), tools=[add], progress=False)
    assert output.error is None


CORPUS_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
