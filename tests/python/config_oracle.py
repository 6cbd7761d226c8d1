"""What NeMo Gym's own loader makes of configuration files. Needs nemo-gym 0.7.0.

  config_oracle.py expected FOLDER   write expected.json into each case folder below FOLDER
  config_oracle.py overrides FILE    rewrite a JSON mapping of override to the mapping that it alone gives (null: refused)
  config_oracle.py resolve           read {"cwd", "args", "env"} lines, write one JSON line for each
  config_oracle.py load-yaml         read JSON strings of YAML text, write what OmegaConf makes of each

A case is a folder with its files, `args` (one override a line) and, optionally, `environment` (NAME=value lines).
"""

import json
import math
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path


def plain(value):
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value


def resolve(cwd, args, env):
    from hydra.core.global_hydra import GlobalHydra
    from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
    from omegaconf import OmegaConf

    before, argv, environ = os.getcwd(), sys.argv, dict(os.environ)
    os.chdir(cwd)
    os.environ.update(env)
    out, err = StringIO(), StringIO()
    try:
        with tempfile.TemporaryDirectory() as run_dir, redirect_stdout(out), redirect_stderr(err):
            sys.argv = ["gym", *args, f"hydra.run.dir={run_dir}", "hydra.output_subdir=null"]
            GlobalHydra.instance().clear()
            config = GlobalConfigDictParser().parse(GlobalConfigDictParserConfig(offline=True))
            return {"merged": plain(OmegaConf.to_container(config, resolve=True))}
    except BaseException as error:
        return {"error": type(error).__name__, "message": str(error)[:300] or err.getvalue()[-300:]}
    finally:
        os.chdir(before)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environ)


def lines(path):
    return [line for line in path.read_text().splitlines() if line] if path.exists() else []


def expected(folder):
    for case in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
        env = dict(line.split("=", 1) for line in lines(case / "environment"))
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(case, copy, dirs_exist_ok=True)
            result = resolve(copy, lines(case / "args"), env)
        if "merged" in result:
            # Where the loader ran, and with which Python, is no property of the case.
            for key in ("results_dir", "cache_dir", "uv_cache_dir", "uv_venv_dir", "head_server_deps", "python_version"):
                result["merged"].pop(key, None)
        else:
            print(f"{case.name}: {result['error']}: {result['message']}")
            result.pop("message")
        (case / "expected.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def overrides(path):
    table = json.loads(Path(path).read_text())
    with tempfile.TemporaryDirectory() as cwd:
        Path(cwd, "main.yaml").write_text("z: 1\n")
        plain = resolve(cwd, ["+config_paths=[main.yaml]"], {})["merged"]
        for override in table:
            merged = resolve(cwd, ["+config_paths=[main.yaml]", override], {}).get("merged")
            table[override] = merged and {key: value for key, value in merged.items() if key not in plain}
    Path(path).write_text(json.dumps(table, indent=0, ensure_ascii=False) + "\n")


def main():
    command = sys.argv[1]
    if command == "expected":
        expected(sys.argv[2])
    if command == "overrides":
        overrides(sys.argv[2])
    for line in sys.stdin if command in ("resolve", "load-yaml") else []:
        request = json.loads(line)
        if command == "resolve":
            answer = resolve(request["cwd"], request["args"], request.get("env", {}))
        else:
            from omegaconf import OmegaConf

            config = OmegaConf.create(request)
            answer = {"raw": plain(OmegaConf.to_container(config))}
            try:
                answer["resolved"] = plain(OmegaConf.to_container(config, resolve=True))
            except Exception as error:
                answer["unresolved"] = str(error)
        print(json.dumps(answer), flush=True)


main()
