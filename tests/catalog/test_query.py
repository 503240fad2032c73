"""SQL over a catalog reads its four tables and nothing else."""

import json
from pathlib import Path

import pytest

from fsdp_inspect.catalog.catalog import Catalog
from fsdp_inspect.errors import QueryError
from fsdp_inspect.report.json import render_json
from fsdp_inspect.report.outcomes import render_query, render_query_csv
from tests.cases import mark_slow
from tests.conftest import Invoke
from tests.report.terminal_text import text_of


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


FORBIDDEN = {
    "read_csv": ("SELECT * FROM read_csv('{secret}')", "outside the catalog"),
    "read_text": ("SELECT * FROM read_text('{secret}')", "outside the catalog"),
    "parquet": ("SELECT * FROM '{secret}.parquet'", "outside the catalog"),
    "glob": ("SELECT * FROM glob('/*')", "outside the catalog"),
    "secrets": ("SELECT * FROM duckdb_secrets()", "outside the catalog"),
    "https": ("SELECT * FROM read_csv('https://127.0.0.1:9/x.csv')", "Remove|Invalid"),
    "copy": ("COPY runs TO '{secret}.csv'", "COPY statement"),
    "export": ("EXPORT DATABASE '{secret}'", "EXPORT statement"),
    "attach": ("ATTACH '{secret}.db'", "ATTACH statement"),
    "install": ("INSTALL httpfs", "LOAD statement"),
    "load": ("LOAD httpfs", "LOAD statement"),
    "set": ("SET memory_limit = '1TB'", "SET statement"),
    "drop": ("DROP VIEW runs", "DROP statement"),
    "create": ("CREATE TABLE x AS SELECT 1", "CREATE statement"),
    "two": ("SELECT 1; DROP VIEW runs", "2 statements"),
    "empty": ("", "0 statements"),
    "nested": ("SELECT * FROM query('COPY runs TO 1')", "Invalid query"),
    "python-variable": ("SELECT * FROM catalog", "Invalid query"),
    "syntax": ("SELEC", "syntax error"),
    "column": ("SELECT stepp_time_ns FROM runs", "step_time_ns"),
}
"""A query, and a part of the error."""
QUICK = ("read_csv", "secrets", "copy", "two", "nested", "column")


@pytest.mark.parametrize("name", mark_slow(FORBIDDEN, but=QUICK))
def test_a_query_of_anything_else_is_an_error(catalog: Catalog, tmp_path: Path, name: str) -> None:
    sql, expected = FORBIDDEN[name]
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


@pytest.mark.parametrize(
    ("sql", "timeout_s", "error"),
    [
        ("SELECT * FROM range(100000000000)", 0.3, "was stopped"),
        ("SELECT CAST(if(range < 50000, '1', 'x') AS INT) FROM range(90000)", 60, "Conversion"),
    ],
)
def test_a_query_that_ends_between_two_rows_has_no_result(
    catalog: Catalog, sql: str, timeout_s: float, error: str
) -> None:
    """The rows before the end look like a complete result."""
    with pytest.raises(QueryError, match=error):
        catalog.query(sql, timeout_s=timeout_s, memory_bytes=1 << 30)


@pytest.mark.parametrize(
    "sql",
    ["SELECT range(20000000) FROM range(1000)", "SELECT repeat('x', 2000000000)"],
    ids=["list", "text"],
)
def test_one_large_value_takes_no_more_memory_than_allowed(catalog: Catalog, sql: str) -> None:
    with pytest.raises(QueryError, match=r"64\.0 MiB|Invalid query"):
        catalog.query(sql, memory_bytes=1, timeout_s=60)


def test_columns_of_one_name_keep_their_values_and_their_unit(catalog: Catalog) -> None:
    found = catalog.query(
        "SELECT 1 AS exposed_ns, 2 AS exposed_ns, 3 AS exposed_ns_2, 4 AS exposed_ns"
    )
    assert found.rows() == [
        {"exposed_ns": 1, "exposed_ns_3": 2, "exposed_ns_2": 3, "exposed_ns_4": 4}
    ]
    assert render_query_csv(found).splitlines()[1] == "1,2,3,4"
    assert text_of(render_query(found)).count(" ns") == 4


VALUES: list[tuple[str, object]] = [
    ("1.50::DECIMAL(4, 2)", 1.5),
    ("sum(i)", 3),
    ("2::HUGEINT ** 70", 2.0**70),
    ("170141183460469231731687303715884105727::HUGEINT", str(2**127 - 1)),
    ("make_timestamp_ns(1795489895588109127)", "2026-11-24 03:11:35.588109127"),
    ("TIMESTAMP 'infinity'", "infinity"),
    ("DATE '-infinity'", "-infinity"),
    ("TIME '10:11:12.5'", "10:11:12.5"),
    ("INTERVAL 3 MONTHS", "3 months"),
    ("'infinity'::DOUBLE", None),
    ("[TIMESTAMP 'infinity', NULL]", ["infinity", None]),
    ("{'a': 1.5::DECIMAL(4, 2), 'b': [DATE '2026-01-02']}", {"a": 1.5, "b": ["2026-01-02"]}),
    ("MAP {'a': 2::HUGEINT}", {"a": 2.0}),
    ("MAP {[1]: 2}", "{[1]=2}"),
    ("row(1, 2)", "(1, 2)"),
    ("'\\xAA'::BLOB", "\\xAA"),
    ("'a'::ENUM('a', 'b')", "a"),
    ("NULL", None),
]


def test_a_value_of_any_type_is_in_json_csv_and_the_table(catalog: Catalog) -> None:
    columns = ", ".join(f"{sql} AS x{place}" for place, (sql, _) in enumerate(VALUES))
    found = catalog.query(f"SELECT {columns} FROM range(3) AS t(i)")
    expected = {f"x{place}": value for place, (_, value) in enumerate(VALUES)}
    assert json.loads(render_json(found))["rows"] == [expected]
    assert render_query_csv(found).partition("\n")[0] == ",".join(expected)
    assert text_of(render_query(found))


def test_no_cell_and_no_header_is_a_formula_or_markup(catalog: Catalog) -> None:
    found = catalog.query("SELECT '=1+1' AS \"@a\", chr(27) || '[2J' AS \"[bold]b\", -3 AS c")
    assert render_query_csv(found) == "'@a,[bold]b,c\n'=1+1,␛[2J,-3\n"
    assert "[bold]b" in text_of(render_query(found))


def test_no_setting_shows_the_home_folder(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/secret")
    found = catalog.query("SELECT * FROM duckdb_settings()")
    assert "secret/" not in render_json(found)
    assert str(Path.home()) not in render_json(found)


def test_the_order_of_a_query_is_kept(catalog: Catalog) -> None:
    found = catalog.query("SELECT i FROM range(300000) AS t(i) ORDER BY i DESC")
    assert found.table.column("i").to_pylist() == list(range(299_999, -1, -1))


def test_the_command_prints_a_table_json_and_csv(invoke: Invoke, runs_folder: Path) -> None:
    def ask(*words: str) -> str:
        return invoke("store", "query", *words, "--runs", runs_folder).out

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
    wrong = invoke("store", "query", "SELECT nothing FROM runs", "--runs", runs_folder)
    assert wrong.code == 2
    assert "Invalid query" in wrong.err
    assert "query --help" in wrong.err
    missing = invoke("store", "query", "SELECT 1", "--runs", tmp_path)
    assert missing.code == 2
    assert "Create it with" in missing.err
