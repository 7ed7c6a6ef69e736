"""No password, key or token leaves the process, in whatever shape; harmless texts stay."""

import json
import re
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_dbb.actors.progress import Progress, StepOutcome
from openrlhf_dbb.rewards.verifier_pool import VerifierPool
from openrlhf_dbb.secrets import is_secret, without_passwords, without_secrets

ROOT = Path(__file__).parents[1]
WORDS = [
    "X API Key", "api key", "AUTH TOKEN", "token", "bearer", "Cookie", "session", "session id", "passphrase", "dsn",
    "aws secret access key", "password", "ssl password", "auth", "basic auth", "client secret", "Authorization",
    "OPENAI API KEY", "hub token", "credentials", "db pass", "private key", "access tokens", "password 2",
    "pw", "app key", "hmac key", "GROQ KEY", "mistral key",
]  # fmt: skip
HARMLESS = [
    "input_key", "label_key", "best_metric_key", "data.pass_rate_key", "max_tokens", "max_new_tokens", "pad_token",
    "eos_token", "eos_token_id", "bos_token", "log_probs_per_token", "tokenizer", "tokens", "monkey", "author",
    "group_key", "data.output_key", "prompt_key", "step_key", "reward_key", "image_key", "advantage_key",
    "authors", "passage", "keyboard", "keys", "num_key_value_heads", "authority", "compass", "sessions_seen", "turkey",
]  # fmt: skip


def as_camel(words):
    first, *rest = words.lower().split()
    return first + "".join(word.capitalize() for word in rest)


STYLES = (
    as_camel,
    lambda words: words.replace(" ", "-"),
    lambda words: words.replace(" ", "_"),
    lambda words: words.replace(" ", "_").upper(),
    lambda words: words.replace(" ", "-").title(),
    lambda words: words.replace(" ", "").lower(),
)
names = st.builds(
    lambda words, style: style(words), st.sampled_from(WORDS), st.sampled_from(STYLES)
)


@settings(max_examples=200, deadline=None)
@given(names)
def test_a_secret_is_known_by_its_name_in_any_style(name):
    # without separators db_pass looks like a compass
    assert is_secret(name) or name == "dbpass"
    assert is_secret(f"--{name}") or name == "dbpass"


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_names_and_their_values_stay(name):
    value = {
        "config": {name: "text"},
        "env": [f"{name}=text"],
        "argv": [f"--{name}", "text"],
        "pair": [name, "text"],
    }
    assert without_secrets(value) == value
    for text in (
        f"--{name} text",
        f"{name}=text",
        f"{{'{name}': 'text'}}",
        f'{{"{name}":"text"}}',
        f"{name}: text",
    ):
        assert without_passwords(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "?x=1 to me@h & co", "reasoning_gym:chain_sum?size=512&seed=1", "with user:password@ before the host",
        "error: --logger.wandb.key: expected one argument (openrlhf-dbb train --help)", "12+9=21<eos>", "100%25 done",
        "openrlhf-dbb serve --store.url /tmp/a.db   a live page, http://127.0.0.1:8650/: all prompts",
        "the columns are ['key', 'token', 'answer']; name one", "https://huggingface.co/datasets/a/b", "",
    ],
)  # fmt: skip
def test_harmless_texts_stay(text):
    assert without_passwords(text) == text


# A secret begins and ends with a letter that stands nowhere else.
inner = st.text(st.sampled_from("aZ9@/:.-_+,&%=~!$^*|"), max_size=8)
secrets = inner.map(lambda text: f"Ω{text}Ω").filter(
    lambda text: not re.search(r",[\w+.-]+:/", text)
)
schemes = st.sampled_from(
    ["http", "https", "s3", "hf", "postgresql", "postgresql+psycopg", "gs", "ftp"]
)
slashes = st.sampled_from(["/", "//"])


def as_json(value, **options):
    return json.dumps(value, ensure_ascii=False, **options)


def assert_masked(text, secret):
    masked = without_passwords(text)
    assert "Ω" not in masked and quote("Ω") not in masked, (text, masked)
    assert without_passwords(masked) == masked


@settings(max_examples=200, deadline=None)
@given(schemes, slashes, secrets, st.data())
def test_no_secret_of_a_url_stays(scheme, slash, secret, data):
    start = data.draw(
        st.sampled_from(["", "error: ", "/home/me/", "url='", "--eval.dataset ", "a.jsonl,"])
    )
    end = data.draw(st.sampled_from(["", ": cannot be read", "', 'lr': 1}", ")", ","]))
    for url in (
        f"{scheme}:{slash}ann:{secret}@host/data.jsonl",
        f"{scheme}:{slash}{secret}@host:5432/data",
        f"{scheme}:{slash}host/data.jsonl?token={secret}",
        f"{scheme}:{slash}host/data.jsonl?a=1&sig={secret}",
        f"{scheme}:{slash}host/data#{secret}",
        f"{scheme}:{slash}ann:{quote(secret, safe='')}@host/data",
        quote(f"{scheme}:{slash}ann:{secret}@host/data", safe=""),
        f"/home/me/ann:{secret}@host/data",
        f"//ann:{secret}@host/data",
        f"{scheme}:{slash}host/" + quote(f"host=h password='{secret}'", safe=""),
    ):
        assert_masked(start + url + end, secret)


@settings(max_examples=200, deadline=None)
@given(names.filter(is_secret), secrets, st.data())
def test_no_value_of_a_secrets_name_stays_in_a_text(name, secret, data):
    start = data.draw(st.sampled_from(["", "error: ", "[", "a=1, ", "--lr 1 "]))
    named = {"lr": 1, name: secret, "seed": 2}
    for text in (
        f"{name}={secret} --lr 1", f"--{name} {secret}", f"--{name}={secret}", f"--{name} '{secret} {secret}'",
        f"{name}: {secret}", f"{name} = {secret}", f"{name}: Bearer {secret}", f"Config({name}='{secret}', lr=1)",
        f"Config({name}=SecretStr('{secret} {secret}'), lr=1)", repr(named), json.dumps(named),
        json.dumps(named, separators=(",", ":")), json.dumps({"text": json.dumps(named)}), repr([(name, secret)]),
        repr([f"--{name}", secret]), repr([f"{name}={secret}", "lr=1"]), repr({name: [secret, {"a": secret}]}),
        repr({name: secret.encode()}).replace("\\xce\\xa9", "Ω"), f"Authorization: Digest a={secret}, b={secret}",
    ):  # fmt: skip
        assert_masked(start + text, secret)


@settings(max_examples=200, deadline=None)
@given(names.filter(is_secret), secrets, st.data())
def test_no_value_beside_its_name_stays_in_a_text(name, secret, data):
    start = data.draw(st.sampled_from(["", "error: ", "lr: 1\n", "[{'name': 'lr', 'value': 1}, "]))
    key = data.draw(st.sampled_from(["name", "key", "Name", "header"]))
    quoted = as_json(secret)
    entries = (
        {key: name, "value": secret},
        {"value": secret, "type": "env", key: name},
        {key: name, "Value": [secret]},
    )
    texts = [
        text
        for entry in entries
        for text in (repr(entry), as_json(entry), as_json(entry, indent=1), as_json(as_json(entry)))
    ]
    texts += [
        f"- {key}: {name}\n  value: {secret}\n- name: lr\n  value: 1",
        f"- name: lr\n  value: 1\n- value: {secret}\n  name: {name}",
        f"EnvVar({key}='{name}', value={quoted})", repr([[name, secret]]), as_json([[name, secret]]),
        as_json({"text": as_json([[name, secret]])}), f"{name}: |\n  {secret}\nlr: 1",
        f"<add {key}='{name}' value='{secret}'/>",
    ]  # fmt: skip
    for text in texts:
        assert_masked(start + text, secret)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("no file at /home/me/http:/ann:hunter2.", "no file at /home/me/http:/***."),
        ("https://ann:1hunter2...", "https://***..."),
        (
            "http://h:80/a:b, http://[::1]:80, sqlite:///a:b.db",
            "http://h:80/a:b, http://[::1]:80, sqlite:///a:b.db",
        ),
        ("no file at /tmp/https:/hunTer2Zq9.", "no file at /tmp/https:/***."),
        ("no file at '/tmp/hf:/hunTer2Zq9'", "no file at '/tmp/hf:/***'"),
        # The cut token stands nowhere behind a slash, or behind two
        (
            "s3://hunTer2Zq9@bucket/a: no file s3://hunTer2Zq9, of hunTer2Zq9",
            "s3://***@bucket/a: no file s3://***, of ***",
        ),
        (
            "http://ann:hunTer2Zq9@h: hunTer2Zq9 of ann is wrong",
            "http://***@h: *** of ann is wrong",
        ),
        # Words before @, and hosts, are no tokens
        ("postgresql://postgres@h/postgres", "postgresql://***@h/postgres"),
        ("/tmp/https:/localhost, hf:/datasets/a", "/tmp/https:/localhost, hf:/datasets/a"),
        ("host:/data path:/tmp s3:/bucket/a", "host:/data path:/tmp s3:/bucket/a"),
        ("auth=HTTPBasicAuth('u', 'hunTer2Zq9'), lr=1", "auth=***'), lr=1"),
        ("auth=Auth(user='u', key=\"a) hunTer2Zq9\") of u", 'auth=***") of u'),
        ("token=hunTer2Zq9 (of ann)", "token=*** (of ann)"),
        ("curl -u ann:hunTer2Zq9 http://h", "curl -u *** http://h"),
        ("curl -s --user 'ann:hunTer2Zq9' http://h", "curl -s --user '***' http://h"),
        ("curl http://h:80/a; docker -u 1:1", "curl http://h:80/a; docker -u 1:1"),
        ("GROQ_KEY=hunTer2Zq9 HOME=/root", "GROQ_KEY=*** HOME=/root"),
        (
            "{'name': 'MISTRAL_KEY', 'value': 'hunTer2Zq9'}",
            "{'name': 'MISTRAL_KEY', 'value': '***'}",
        ),
        ("first pass: 3 of 4, pass=0.5", "first pass: 3 of 4, pass=0.5"),
        ("the password is hunter2.", "the password is ***."),
        ("Password for ann was 'hunter 2', ask her", "Password for ann was '***', ask her"),
        ("the API key is hunter2", "the API key is ***"),
        ("your token is abcdefgh1", "your token is ***"),
        ("password: hunter2 of ann", "password: *** of ann"),
        ("[['TOKEN', 1234], ['lr', 1]]", "[['TOKEN', ***], ['lr', 1]]"),
        ("pwd = hunter2", "pwd = ***"),
        ("header Basic YW5uOmh1bnRlcjI=, refused", "header Basic ***, refused"),
        ("curl -H 'Authorization: Basic YW5uOmh1bnRlcjI='", "curl -H 'Authorization: ***'"),
        ("Proxy-Authorization: Digest a=1, b=2", "Proxy-Authorization: ***"),
    ],
)
def test_a_secret_that_a_sentence_tells_is_masked(text, masked):
    assert without_passwords(text) == masked == without_passwords(masked)


@pytest.mark.parametrize(
    "text",
    [
        "the password is wrong", "the password is not given", "basic arithmetic, basic training",
        "the secret is to wait",
        "{'name': 'lr', 'value': 0.1}, {'value': 'x', 'name': 'seed'}",
        "['token', 'key', 'answer']", "the end token is missing", "value: 3", "name: x\nvalue: y",
    ],
)  # fmt: skip
def test_sentences_about_secrets_and_other_entries_stay(text):
    assert without_passwords(text) == text


@pytest.fixture(scope="module")
def holder():
    """A class of somebody else, whose repr shows its fields."""
    return make_dataclass("Holder", ["api_key", "lr"])


def test_a_token_of_a_known_form_is_masked_without_a_name():
    assert (
        without_passwords("Invalid user token hf_" + "a" * 34 + " given")
        == "Invalid user token *** given"
    )
    letters = "a" * 20
    for token in (f"gsk_{letters}", f"AIza{letters}", f"xoxb-123456-{letters}"):
        assert without_passwords(f"given {token}, used") == "given ***, used"
    web_token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"
    assert without_passwords(f"given {web_token}, used") == "given ***, used"
    harmless = "hf_dataset sk-learn gsk_data AIza xoxb-data eyJ.a.b"
    assert without_passwords(harmless) == harmless


def test_what_a_run_says_about_tokens_stays():
    said = Progress(
        difference=1.0, outcomes=[StepOutcome(512, 0, 512)], has_end_token=False
    ).troubles(held_out_samples=1, max_new_tokens=24, punishes_failures=False)
    assert len(said) == 2 and all(without_passwords(line) == line for line in said.values())


NESTED = {
    "a": [("https:/u:hunter2@h/x",), {"X-API-Key": "hunter2", "input_key": "question"}],
    "env": ["OPENAI_API_KEY=hunter2", "HOME=/root"],
    "pairs": [
        {"name": "API_KEY", "value": "hunter2"},
        {"Value": "hunter2", "Key": "hub_token"},
    ],
    "text": "{'name': 'API_KEY', 'value': 'hunter2'}",
    "header": {"value": "hunter2", "header": "X-API-Key"},
    "argv": ["train", "--hub-token", "hunter2", "--lr", "1"],
    "headers": [("Authorization", "Bearer hunter2"), ("Accept", "*/*")],
    "namespace": SimpleNamespace(auth="hunter2", lr=1),
    "path": Path("https://u:hunter2@h/x"),
    "set": {"password=hunter2"},
    "bytes": b"token=hunter2",
    "session": {"id": ["hunter2"]},
    "https://u:hunter2@h": None,
    "use_auth_token": True,
    "pass": "hunter2",
    "rates": {"pass": 0.5, "step_key": "step"},
    "hub_token": None,
    "password": 1234,
    "max_tokens": 24,
}


def test_no_secret_stays_in_nested_values(holder):
    masked = without_secrets(NESTED | {"object": holder("hunter2", 1)})
    assert "hunter2" not in repr(masked)
    assert "1234" not in repr(masked)
    assert json.dumps(masked | {"namespace": None})  # all of it is JSON


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", [["https:/***@h/x"], {"X-API-Key": "***", "input_key": "question"}]),
        ("env", ["OPENAI_API_KEY=***", "HOME=/root"]),
        ("argv", ["train", "--hub-token", "***", "--lr", "1"]),
        ("headers", [["Authorization", "***"], ["Accept", "*/*"]]),
        ("session", "***"),
        ("path", "https:/***@h/x"),
        ("use_auth_token", True),
        ("pass", "***"),
        ("rates", {"pass": 0.5, "step_key": "step"}),
        ("hub_token", None),
        ("max_tokens", 24),
    ],
)
def test_of_nested_values_all_but_the_secrets_stays(name, expected):
    masked = without_secrets(NESTED)
    assert masked[name] == expected
    assert masked["namespace"].lr == 1


LOGS = """
import logging, threading, sys
from openrlhf_dbb.secrets import mask_process
mask_process(); mask_process()
log = logging.getLogger("openrlhf.utils.agent")
log.addHandler(logging.StreamHandler(sys.stdout))
log.propagate = False
log.warning("Request error, please check: %s", "500, url='http://h/score?key=hunter2'")
log.warning("%d", "http://u:hunter2@h")
log.warning("%s of %s", 1, 2)
def fail():
    raise ValueError("http://u:hunter2@h is wrong")
try:
    fail()
except ValueError:
    log.exception("token=hunter2")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
"""


def test_what_a_process_logs_and_its_tracebacks_are_masked(tmp_path):
    (tmp_path / "logs.py").write_text(LOGS)
    done = subprocess.run(
        [sys.executable, tmp_path / "logs.py"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    # the traceback quotes the script's own line
    said = (done.stdout + done.stderr).replace('"http://u:hunter2@h is wrong"', "")
    assert "hunter2" not in said and "Logging error" not in said
    assert "url='http://h/score?***'\n" in done.stdout and "1 of 2\n" in done.stdout
    assert "ValueError: http://***@h is wrong" in done.stdout
    # Of the thread, and of the process
    assert done.stderr.count("ValueError: http://***@h is wrong") == 2


OF_OTHERS = """
import logging, sys
from openrlhf_dbb.secrets import own_log
logging.basicConfig(stream=sys.stdout)
own_log("openrlhf_dbb.integrations.trl").warning("cannot read %s", "http://u:hunter2@h")
logging.getLogger("theirs").warning("theirs: http://u:own@h")
"""


def test_our_records_are_masked_in_a_process_of_others_and_theirs_are_not(tmp_path):
    (tmp_path / "logs.py").write_text(OF_OTHERS)
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, tmp_path / "logs.py"], env=environment, capture_output=True, text=True
    )
    assert "cannot read http://***@h" in done.stdout and "theirs: http://u:own@h" in done.stdout


@pytest.mark.parametrize(
    "path",
    [
        "rewards/math_answer",
        "rewards/verifier_pool",
        "integrations/shared",
        "integrations/trl",
        "integrations/trl_memory",
    ],
)
def test_what_may_run_in_a_process_of_others_logs_through_the_mask(path):
    text = (ROOT / "openrlhf_dbb" / f"{path}.py").read_text()
    assert "own_log(__name__)" in text and "getLogger" not in text


def test_a_process_of_a_verifier_masks_what_it_logs(tmp_path, monkeypatch, capfd):
    (tmp_path / "leaky.py").write_text(
        "import logging\nfrom openrlhf_dbb.rewards.verifier_pool import serve\n"
        "def reply(**_):\n    logging.error('http://u:hunter2@h')\n    return {'correct': True}\n"
        "serve(9.0, 'json', reply)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = VerifierPool(1, 9.0, "leaky")
    assert pool.ask({"label": "1", "answer": "1"}) == {"correct": True}
    pool.close()
    said = capfd.readouterr().err
    assert "http://***@h" in said and "hunter2" not in said
