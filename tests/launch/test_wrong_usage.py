"""Wrong usage of the command `keras-sparsity run` ends with its reason."""

import re

import pytest

import keras_sparsity as ks

FROM_ZERO = "must be an integer from 0.*: "
COMMAND_LINE = [
    ("", "one of the arguments -n.* --hosts --hostfile is required"),
    ("-n 2", "name the script to run"),
    ("-n 0 SCRIPT", "argument -n.*: must be a positive integer.*: '0'"),
    ("-n -1 SCRIPT", "argument -n.*: must be a positive integer.*: '-1'"),
    ("-n two SCRIPT", "argument -n.*: must be a positive integer.*: 'two'"),
    ("-n 2 missing.py", "there is no script 'missing.py'"),
    ("-n 2 python train.py", "there is no script 'python'. Leave the"),
    ("-n 2 --unknown SCRIPT", "unrecognized arguments: --unknown"),
    ("-n 2 --hosts a:2 SCRIPT", "--hosts: not allowed with argument -n"),
    (
        "--hosts a:2 --hostfile f SCRIPT",
        "--hostfile: not allowed.*--hosts",
    ),
    ("--hosts a:x SCRIPT", "must be a number"),
    ("--hosts a:0+2 SCRIPT", "at least one worker.*2 servers and no worker"),
    ("--hosts a:2 --servers 1 SCRIPT", "--servers is for -n;.*a:2\\+1"),
    ("-n 2 --servers -1 SCRIPT", f"--servers: {FROM_ZERO}'-1'"),
    ("-n 2 --servers x SCRIPT", f"--servers: {FROM_ZERO}'x'"),
    ("--hostfile missing SCRIPT", "No such file or directory: 'missing'"),
    ("-n 2 --engine mpi SCRIPT", "argument --engine: must be one of.*: 'mpi'"),
    ("-n 2 --engine local SCRIPT", "for one process.*Use --engine native"),
    ("-n 2 --env =3 SCRIPT", "--env takes NAME or NAME=VALUE"),
    ("-n 2 --env NOT_SET SCRIPT", "no such variable here"),
    ("-n 2 --python p SCRIPT", "--python is for other hosts"),
    ("-n 2 --ssh s SCRIPT", "--ssh is for other hosts"),
    ("--hosts a:2 --ssh ' SCRIPT", '--ssh takes a client.*Received: "\'"'),
    ("-n 2 --max-restarts -1 SCRIPT", f"--max-restarts: {FROM_ZERO}'-1'"),
    ("-n 2 --max-restarts x SCRIPT", f"--max-restarts: {FROM_ZERO}'x'"),
    ("-n 2 --rank-timeout 1 SCRIPT", "--rank-timeout must be a number"),
    ("-n 2 --rank-timeout nan SCRIPT", "at least 5"),
    ("-n 2 --timeout -1 SCRIPT", "--timeout: must be a positive number.*'-1'"),
    ("-n 2 --timeout x SCRIPT", "--timeout: must be a positive number.*'x'"),
    ("-n 2 --log-dir SCRIPT SCRIPT", "--log-dir takes a folder.*File exists"),
    ("-n 2 --log-dir /proc/a/b SCRIPT", "--log-dir takes a folder.*No such"),
    ("-n 2 --log-dir /proc/self SCRIPT", "--log-dir takes a folder"),
    ("-n 2 --log-dir SCRIPT/a SCRIPT", "--log-dir takes.*Not a directory"),
    ("-n 20000 SCRIPT", "At most 10000 processes.*Received: 20000"),
    (f"-n {'9' * 99} SCRIPT", "At most 10000 processes"),
    ("-n 10000 SCRIPT", "of memory, and this machine has .* Start fewer"),
    ("-n 1.5 SCRIPT", "argument -n.*: must be a positive integer.*'1.5'"),
    (f"--hosts a:{'9' * 9999} SCRIPT", "At most 10000 processes"),
    ("--hosts localhost:10000 SCRIPT", "of memory, and this machine has"),
    ("--hosts a:1 --ssh \\ SCRIPT", "--ssh takes a client and its options"),
    ("--hostfile /dev/zero SCRIPT", "/dev/zero is not a text file of hosts"),
    ("--hostfile /proc/self/exe SCRIPT", "is not a text file of hosts"),
    ("--hostfile / SCRIPT", "Is a directory"),
    ("-n 2 --timeout nan SCRIPT", "--timeout: must be a positive number.*nan"),
    ("-n 2 --env KERAS_SPARSITY_TIMEOUT=1 SCRIPT", "TIMEOUT must be a number"),
    ("-n 2 --env KERAS_SPARSITY_SEED=x SCRIPT", "SEED must be a whole number"),
    ("-n 2 --module", "name the script to run"),
]
ANY_OPTION = {
    "--help": "takes no value",
    "--num-processes": "-n",
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('it ran')")
    return str(path)


@pytest.mark.parametrize(("arguments", "message"), COMMAND_LINE)
def test_wrong_usage_is_explained(arguments, message, script, capsys):
    arguments = arguments.replace("SCRIPT", script).split()
    with pytest.raises(SystemExit) as end:
        ks.launch.main(["run", *arguments])
    assert end.value.code == 2
    # Lines are broken to the terminal's width.
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(message, told), told


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SSH", "'", 'KERAS_SPARSITY_SSH takes a client.*Received: "\'"'),
        ("SSH", " ", "KERAS_SPARSITY_SSH takes a client.*Received: ' '"),
        ("TIMEOUT", "soon", "KERAS_SPARSITY_TIMEOUT must be.*'soon'"),
        ("SEED", "-1", "KERAS_SPARSITY_SEED must be.*'-1'"),
        (
            "ALLOWED_NETWORKS",
            "x",
            "_ALLOWED_NETWORKS must be IP.*Received: 'x'",
        ),
    ],
)
def test_a_wrong_variable_is_explained(
    name, value, message, script, capsys, monkeypatch
):
    monkeypatch.setenv(f"KERAS_SPARSITY_{name}", value)
    with pytest.raises(SystemExit):
        ks.launch.main(["run", "--hosts", "a:1", script])
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(message, told), told


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ("false", "a: 'false' ended with code 1 and printed no error: is it"),
        ("true", "a: no answer from Python, .*: is 'true' an ssh client?"),
        ("echo", "a: no answer from Python, .*: is 'echo' an ssh client?"),
        ("/", "a: cannot run /: Permission denied"),
        ("/missing/ssh", "a: cannot run /missing/ssh: No such file"),
    ],
)
def test_what_is_no_ssh_client(client, message, script, capsys):
    hosts = ["--hosts", "a:1", "--ssh", client]
    assert ks.launch.main(["run", *hosts, script]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "option",
    [
        *("-n", "--hosts", "--hostfile", "--engine", "--log-dir", "--timeout"),
        *("--rank-timeout", "--max-restarts", "--env", "--python", "--ssh"),
    ],
)
def test_no_value_of_an_option_breaks_the_command(option, tmp_path, capsys):
    """Nothing starts, as there is no script."""
    odd = ["", " ", "'", '"', "-", "--", "0", "-1", "nan", "1e999", "0x10"]
    odd += ["None", "[]", "a,b", "a:1,,", ":", "@", "/", "/dev/null", "~"]
    odd += ["é", "\udcff", "\n", "\x7f", "%s", "{}", "$(id)", "9" * 5000]
    for value in odd:
        where = [] if option in ("-n", "--hosts", "--hostfile") else ["-n", "1"]
        if option in ("--python", "--ssh"):
            where = ["--hosts", "a:1"]
        with pytest.raises(SystemExit) as end:
            ks.launch.main(
                ["run", *where, f"{option}={value}", str(tmp_path / "none")]
                if option.startswith("--")
                else ["run", *where, option, value, str(tmp_path / "none")]
            )
        assert end.value.code == 2, value
        errors = capsys.readouterr().err
        assert "keras-sparsity run: error: " in errors, value


def test_every_option_is_in_the_table(capsys):
    with pytest.raises(SystemExit):
        ks.launch.main(["run", "--help"])
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out))
    tested = " ".join(arguments for arguments, _ in COMMAND_LINE).split()
    assert options <= set(tested) | ANY_OPTION.keys()
