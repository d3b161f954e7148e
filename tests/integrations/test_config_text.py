"""Reading configuration texts: HJSON, base64, dicts; mistakes name the place."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.deepspeed_config import hjson
from offload.deepspeed_config.source import read
from offload.errors import ConfigError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(), PLAIN, max_size=5), st.sampled_from([None, 2]), st.booleans())
def test_every_json_object_reads_as_json_reads_it(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert hjson.loads(text) == json.loads(text)


def test_comments_bare_names_and_missing_commas_are_read():
    text = """
    # for two drives
    {
      // the optimizer
      optimizer: { type: AdamW, "params": { lr: 3e-5 } }   # a comment behind
      steps: 5e8 /* elements */
      path: /local_nvme/run-1
      "list": [1, 2, three,],
      'single': 'it''s not',
      lines: '''
one
two
'''
      on: true, off: false, none: null,
    }
    """.replace("it''s not", "its")
    assert hjson.loads(text) == {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}, "steps": 5e8,
        "path": "/local_nvme/run-1", "list": [1, 2, "three"], "single": "its",
        "lines": "one\ntwo", "on": True, "off": False, "none": None,
    }  # fmt: skip


def test_outer_braces_may_be_missing():
    assert hjson.loads("a: 1\nb: {c: x}\n") == {"a": 1, "b": {"c": "x"}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1,\n "a": 2}', r"line 2, column 2: expected 'a' once, got it twice"),
        ('{"z": {"b": 1, "b": 1}}', r"column 16: expected 'b' once"),
        ('{"a": 1', r"expected a name in quotes, got the end"),
        ('{"a" 1}', r"column 6: expected ':' after 'a', got '1'"),
        ('{"a": "b}', r"expected a closing \""),
        ('{"a": }', r"expected a value, got '}'"),
        ('{"a": 1} x', r"expected the end of the text, got 'x'"),
        ("[1]", r"expected an object of settings, got '\['"),
        ('{"a": [1', r"expected '\]', got the end"),
        ('{"a": "\\q"}', r"expected a text with valid escapes"),
        ("{a: '''x", r"expected ''' at the end"),
        ("[" * 5000, r"expected an object of settings"),
        ("a: " + "[" * 100_000, r"nested too deeply"),
        ("{/* x", r"expected a name in quotes, got '/'"),
    ],
)
def test_a_mistake_is_told_with_its_place(text, told):
    with pytest.raises(ConfigError, match=told):
        hjson.loads(text)


def test_a_file_a_dict_and_base64_hold_the_same(tmp_path):
    config = {"zero_optimization": {"stage": 3}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    packed = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert read(path) == read(str(path)) == read(config) == read(packed) == config
    assert read(config) is not config


@pytest.mark.parametrize("source", ["no/such/file.json", "ds_config.json", 3, ["a"]])
def test_what_is_no_configuration_is_refused(source):
    with pytest.raises(ConfigError, match="config: expected"):
        read(source)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="readable text file"):
        read(path)
