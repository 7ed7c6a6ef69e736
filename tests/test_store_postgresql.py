"""What is PostgreSQL's alone: poolers, the parameters of a URL, and the encoding of a database."""

import os
import shutil
import socket
import subprocess
import time

import pytest
from conftest import execute

from openrlhf_dbb.storage import StoreError, open_store, read_log


def test_no_connection_keeps_a_prepared_statement(open_new, fill):
    store = open_new("postgresql")
    run = fill.run(store)
    ids = fill.prompts(store, 5)
    for step in range(1, 20):  # psycopg prepares what it has run five times, unless told otherwise
        fill.train(run, ids, [step])
        store.runs()
        read_log(store, run.record)
    assert store.query("SELECT count(*) FROM pg_prepared_statements") == [(0,)]


@pytest.fixture
def pooled_url(own_postgres, tmp_path):
    """URL of a database behind a pgbouncer that has two connections, each lent for one transaction."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("needs pgbouncer; on Debian: apt-get install pgbouncer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = own_postgres.pgdata
    settings = data.parent / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\npostgres = host={data} dbname=postgres user=postgres\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        "pool_mode = transaction\ndefault_pool_size = 2\n"
    )
    data.parent.chmod(0o755)
    settings.chmod(0o644)
    command = [program, "--quiet", str(settings)]
    if os.geteuid() == 0:  # as which it refuses to run
        command += ["--user", data.owner()]
    pooler = subprocess.Popen(command)
    try:
        for _ in range(100):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        pooler.terminate()
        pooler.wait(10)


def test_runs_side_by_side_through_a_pooler_that_lends_connections_for_a_transaction(
    pooled_url, fill
):
    stores = [open_store(pooled_url) for _ in range(3)]
    runs = [fill.run(store, f"run {place}") for place, store in enumerate(stores)]
    ids = fill.prompts(stores[0], 20)
    for step in range(1, 15):
        for run in runs:
            fill.train(run, ids, [step])
            run.record_metrics(step, {"loss": 1.0})
            run.record_checkpoint(step, f"step{step}")
    for store, run in zip(stores, runs, strict=True):
        run.finish()
        fill.check_trained(store, run, ids, 14)
        store.close()
    with open_store(pooled_url, read_only=True) as reader:
        assert len(read_log(reader, reader.find_run("run 1")).step) == 14 * 20


@pytest.mark.parametrize("value", ["0", "7", "none"])
def test_the_url_may_say_when_statements_are_prepared(new_url, value):
    url = new_url("postgresql", tables=True) + f"&prepare_threshold={value}"
    with open_store(url) as store, store.database.engine.connect() as connection:
        threshold = connection.connection.dbapi_connection.prepare_threshold
    assert threshold == {"0": 0, "7": 7, "none": None}[value]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("prepare_threshold=soon", "prepare_threshold=soon; write none or a number"),
        ("prepare_threshold=-1", "prepare_threshold=-1; write none or a number"),
        ("connect_timeout=x", "connect_timeout: 'x'"),
        ("connect_timeout=1&connect_timeout=2", "'connect_timeout' more than once"),
        ("autocommit=1", "parameter 'autocommit', which does not exist"),
        ("row_factory=dict", "parameter 'row_factory', which does not exist"),
        ("plugin=x", "parameter 'plugin', which does not exist"),
        ("sslmode=x", "sslmode"),
        ("host=a:x", "port"),
    ],
)
def test_parameters_of_a_url_that_cannot_be_used_are_refused_in_one_line(
    new_url, parameter, message
):
    with pytest.raises(StoreError, match=message) as refusal:
        open_store(f"{new_url('postgresql')}&{parameter}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_cannot_store_every_text_is_refused(postgres, encoding):
    name = f"dbb_{encoding.lower()}"
    execute(postgres, f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    try:
        with pytest.raises(StoreError, match=f"{encoding}.*UTF8: CREATE DATABASE .*template0"):
            open_store(postgres.replace("/postgres?", f"/{name}?"))
    finally:
        execute(postgres, f"DROP DATABASE {name}")


def test_a_text_of_a_query_that_cannot_be_sent_is_a_store_error(store):
    with pytest.raises(StoreError, match="surrogates not allowed"):
        store.query("SELECT * FROM prompts WHERE prompt = :prompt", prompt="\ud800")


def test_a_number_of_a_query_that_cannot_be_sent_is_a_store_error(store):
    with pytest.raises(StoreError):
        store.query("SELECT * FROM prompts WHERE prompt_id = CAST(:id AS BIGINT)", id=2**70)
