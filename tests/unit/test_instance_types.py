from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.cloud.catalogue import InstanceType, load_table, parse_table
from rubberband.errors import InputError


def test_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "# mine\n\ngpu,instance_type, gpus ,gpu_memory_gib,spot_share,us-east-1,lab-a\n"
        'RTX 4090,"box",2,24,0.5,,~1e-1\nT4,g4dn.xlarge,1,16,,0.526,\n',
        encoding="utf-8-sig",
    )
    assert load_table(path) == {
        "box": InstanceType(
            instance_type="box",
            gpus=2,
            gpu="RTX 4090",
            gpu_memory_gib=24.0,
            spot_share=0.5,
            prices_usd_per_hour={"lab-a": 0.1},
            approximate=frozenset({"lab-a"}),
        ),
        "g4dn.xlarge": InstanceType(
            instance_type="g4dn.xlarge", gpus=1, gpu="T4", gpu_memory_gib=16.0, prices_usd_per_hour={"us-east-1": 0.526}
        ),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "mine.csv has no instance types; write a header line"),
        ("instance_type,gpus\n", "mine.csv has no instance types; write a header line"),
        ("instance_type,gpu\n", "mine.csv:1: column gpus is missing; the first line names the columns, add it"),
        ("# x\ninstance_type,gpus,gpus\n", "mine.csv:2: column 'gpus' occurs twice; remove one"),
        (
            "instance_type,gpus,vcpu\n",
            "mine.csv:1: column 'vcpu' is neither known nor a region such as us-east-1; did ",
        ),
        ("instance_type,gpus\na,1\na,2\n", "mine.csv:3: a occurs twice (first in line 2); remove one"),
        ("instance_type,gpus\na\n", "mine.csv:2: 1 cells, and the header has 2; leave what is unknown empty"),
        ("instance_type,gpus\n,1\n", "mine.csv:2: '' is not the name of an instance type; write one, such as"),
        ("instance_type,gpus\na,\n", "mine.csv:2: gpus: '' is not a whole number of at least 1; write one"),
        ("instance_type,gpus\na,0\n", "mine.csv:2: gpus: '0' is not a whole number of at least 1; write one"),
        ("instance_type,gpus\na,1.5\n", "mine.csv:2: gpus: '1.5' is not a whole number of at least 1; write one"),
        ("instance_type,gpus,us-east-1\na,1,-2\n", "mine.csv:2: us-east-1: '-2' is not a number from 0 to 1e9; write"),
        ("instance_type,gpus,us-east-1\na,1,nan\n", "mine.csv:2: us-east-1: 'nan' is not a number from 0 to 1e9; "),
        ("instance_type,gpus,us-east-1\na,1,3 USD\n", "mine.csv:2: us-east-1: '3 USD' is not a number from 0 to 1e9"),
        ("instance_type,gpus,us-east-1\na,1,~\n", "mine.csv:2: us-east-1: '~' is no price; write one after the ~"),
        ("instance_type,gpus,spot_share\na,1,1.5\n", "mine.csv:2: spot_share: 1.5 is not in (0, 1]; write the spot"),
        ('instance_type,gpus\n"a,1\n', "mine.csv:2: not CSV (unexpected end of data); separate cells by commas"),
    ],
)
def test_a_bad_table_is_reported_with_its_line(content: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_table(content.splitlines(), "mine.csv")
    assert str(caught.value).startswith(message)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\); give a CSV file"):
        load_table(tmp_path / "none.csv")
    path = tmp_path / "mine.csv"
    path.write_bytes(b"instance_type,gpus\n\xff,1\n")
    with pytest.raises(InputError, match=r"mine.csv:2: not UTF-8"):
        load_table(path)
    path.write_bytes(b"#" * (5 << 20))
    with pytest.raises(InputError, match="is larger than 4 MiB"):
        load_table(path)


@given(st.text(max_size=60) | st.text(st.sampled_from("ab,1.\"'# \n-"), max_size=40))
def test_any_text_is_a_table_or_an_input_error(text: str) -> None:
    message = ""
    try:
        parse_table(("instance_type,gpus,us-east-1\n" + text).splitlines(), "mine.csv")
    except InputError as error:
        message = str(error)
    assert "\n" not in message
