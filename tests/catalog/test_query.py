"""SQL over a catalog reads its four tables and nothing else."""

import json
from pathlib import Path

import pytest

from fsdp_inspect.catalog.catalog import Catalog
from fsdp_inspect.errors import QueryError
from tests.conftest import Invoke


def test_a_query_joins_the_tables(catalog: Catalog) -> None:
    found = catalog.query(
        "SELECT unit, count(*) AS n, max(units.exposed_ns) AS exposed_ns FROM units "
        "JOIN runs USING (run) WHERE settings['config.lr'] = '0.1' AND list_contains(tags, 'main') "
        "GROUP BY unit ORDER BY unit"
    )
    assert found.rows() == [
        {"unit": "layers.0", "n": 2, "exposed_ns": 150},
        {"unit": "layers.1", "n": 2, "exposed_ns": 80},
    ]
    assert list(found.to_pandas()["unit"]) == ["layers.0", "layers.1"]
    assert "150 ns" in found._repr_html_()


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        pytest.param("SELECT * FROM read_csv('{secret}')", "outside the catalog", id="read_csv"),
        pytest.param("SELECT * FROM read_text('{secret}')", "outside the catalog", id="read_text"),
        pytest.param("SELECT * FROM '{secret}.parquet'", "outside the catalog", id="parquet"),
        pytest.param("SELECT * FROM glob('/*')", "outside the catalog", id="glob"),
        pytest.param("SELECT * FROM duckdb_secrets()", "outside the catalog", id="secrets"),
        pytest.param(
            "SELECT * FROM read_csv('https://127.0.0.1:9/x.csv')", "Remove|Invalid", id="https"
        ),
        pytest.param("COPY runs TO '{secret}.csv'", "COPY statement", id="copy"),
        pytest.param("EXPORT DATABASE '{secret}'", "EXPORT statement", id="export"),
        pytest.param("ATTACH '{secret}.db'", "ATTACH statement", id="attach"),
        pytest.param("INSTALL httpfs", "LOAD statement", id="install"),
        pytest.param("LOAD httpfs", "LOAD statement", id="load"),
        pytest.param("SET memory_limit = '1TB'", "SET statement", id="set"),
        pytest.param("DROP VIEW runs", "DROP statement", id="drop"),
        pytest.param("CREATE TABLE x AS SELECT 1", "CREATE statement", id="create"),
        pytest.param("SELECT 1; DROP VIEW runs", "2 statements", id="two"),
        pytest.param("", "0 statements", id="empty"),
        pytest.param("SELECT * FROM query('COPY runs TO 1')", "Invalid query", id="nested"),
        pytest.param("SELECT * FROM catalog", "Invalid query", id="python-variable"),
        pytest.param("SELEC", "syntax error", id="syntax"),
        pytest.param("SELECT stepp_time_ns FROM runs", "step_time_ns", id="column"),
    ],
)
def test_a_query_of_anything_else_is_an_error(
    catalog: Catalog, tmp_path: Path, sql: str, expected: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a,b\n1,2\n")
    with pytest.raises(QueryError, match=expected):
        catalog.query(sql.format(secret=secret))
    assert sorted(tmp_path.iterdir()) == [secret]


def test_time_and_memory_of_a_query_are_limited(catalog: Catalog) -> None:
    with pytest.raises(QueryError, match=r"stopped after 0\.2 s"):
        catalog.query("SELECT sum(hash(a.range)) FROM range(1000000000000) a", timeout_s=0.2)
    with pytest.raises(QueryError, match=r"64\.0 MiB"):
        catalog.query(
            "SELECT * FROM range(100000000) ORDER BY hash(range)", memory_bytes=1, timeout_s=300
        )
    with pytest.raises(QueryError, match=r"exceeds 64\.0 MiB"):
        catalog.query("SELECT * FROM range(100000000)", memory_bytes=1, timeout_s=300)


def test_the_command_prints_a_table_json_and_csv(invoke: Invoke, runs_folder: Path) -> None:
    def ask(*words: str) -> str:
        return invoke("query", *words, "--runs", runs_folder).out

    sql = "SELECT run, step_time_ns FROM runs WHERE run LIKE 'run-%' ORDER BY run LIMIT 2"
    assert ask(sql).split() == (
        ["run", "step_time_ns", "run-0", "1.00", "µs", "run-1", "1.00", "µs"]
    )
    assert json.loads(ask(sql, "--json"))["rows"] == [
        {"run": "run-0", "step_time_ns": 1000},
        {"run": "run-1", "step_time_ns": 1000},
    ]
    assert ask(sql, "--csv") == ("run,step_time_ns\nrun-0,1000\nrun-1,1000\n")
    wide = ask("SELECT * FROM runs WHERE run = 'run-0'")
    assert max(map(len, wide.splitlines())) <= 80


def test_a_wrong_query_exits_with_2_and_says_what_to_do(
    invoke: Invoke, runs_folder: Path, tmp_path: Path
) -> None:
    wrong = invoke("query", "SELECT nothing FROM runs", "--runs", runs_folder)
    assert wrong.code == 2
    assert "Invalid query" in wrong.err
    assert "query --help" in wrong.err
    missing = invoke("query", "SELECT 1", "--runs", tmp_path)
    assert missing.code == 2
    assert "Create it with" in missing.err
