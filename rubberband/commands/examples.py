"""Examples of every command, at the end of its help and on the page of the commands."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "rubberband init": (
        "rubberband init",
        "rubberband init my_module:MyTrial --file search.yaml",
        "rubberband init train.py --data d",
        "rubberband init --metric val_loss -- python -m my_package.train --epochs 5",
    ),
    "rubberband estimate": (
        "rubberband estimate experiment.yaml",
        "rubberband estimate experiment.yaml -s constraints.deadline=30m",
        "rubberband estimate experiment.yaml --live --html estimate.html",
    ),
    "rubberband check": ("rubberband check experiment.yaml", "rubberband check 'python train.py --lr 0.1'"),
    "rubberband profile": (
        "rubberband profile experiment.yaml",
        "rubberband profile experiment.yaml --iterations 3 --out laptop.json",
    ),
    "rubberband simulate": (
        "rubberband simulate team.yaml jobs.csv --policy fitness",
        "rubberband simulate team.yaml jobs.csv --html policies.html",
    ),
    "rubberband run": (
        "rubberband run experiment.yaml",
        "rubberband run experiment.yaml -s resources.provider=virtual --new",
        "rubberband run experiment.yaml --on head",
    ),
    "rubberband resume": ("rubberband resume digits", "rubberband resume digits --on head"),
    "rubberband status": ("rubberband status digits", "rubberband status digits --watch"),
    "rubberband logs": ("rubberband logs digits", "rubberband logs digits 12 --follow"),
    "rubberband cancel": ("rubberband cancel digits",),
    "rubberband stop": ("rubberband stop digits 12", "rubberband stop digits 3 5 8"),
    "rubberband extend": (
        "rubberband extend digits --deadline 2h --dry-run",
        "rubberband extend digits --max-cost 20",
        "rubberband extend digits --num-samples +16",
    ),
    "rubberband add": ("rubberband add digits lr=0.1 width=64", "rubberband add digits lr=0.03 --dry-run"),
    "rubberband clone": ("rubberband clone digits 12 lr=1e-4", "rubberband clone digits 12 lr=1e-4 --from-checkpoint"),
    "rubberband scale": ("rubberband scale digits --max-instances 2",),
    "rubberband ps": ("rubberband ps", "rubberband ps --search running --server https://tuning.example.org"),
    "rubberband report": ("rubberband report digits", "rubberband report digits --html report.html"),
    "rubberband best": ("rubberband best digits", "rubberband best digits --iteration best --out model.pt"),
    "rubberband artifacts": ("rubberband artifacts digits", "rubberband artifacts digits 3 --to files"),
    "rubberband export": ("rubberband export digits trials.csv", "rubberband export digits --to sqlite:///study.db"),
    "rubberband tag": ("rubberband tag digits +vision -old --note 'The baseline'", "rubberband tag digits --archive"),
    "rubberband rm": ("rubberband rm digits", "rubberband rm digits digits-2 --dry-run"),
    "rubberband mcp": ("rubberband mcp", "rubberband mcp --skill"),
    "rubberband backup": ("rubberband backup /mnt/backups/monday",),
    "rubberband restore": ("rubberband restore /mnt/backups/monday",),
    "rubberband serve": (
        "rubberband serve",
        "rubberband serve --allow 'trials:*' --code ~/trials --max-cost 50",
        "rubberband serve --host 0.0.0.0 --host-name tuning.example.org",
    ),
    "rubberband submit": (
        "rubberband submit experiment.yaml --watch",
        "rubberband submit experiment.yaml --server https://tuning.example.org",
    ),
    "rubberband token": ("rubberband token create ada",),
    "rubberband token create": (
        "rubberband token create ada",
        "rubberband token create ci --scope submit --expires 30d",
    ),
    "rubberband token list": ("rubberband token list",),
    "rubberband token revoke": ("rubberband token revoke 3",),
    "rubberband pool": ("rubberband pool up team.yaml",),
    "rubberband pool up": ("rubberband pool up team.yaml",),
    "rubberband pool status": ("rubberband pool status team", "rubberband pool status team --html pool.html"),
    "rubberband pool down": ("rubberband pool down team",),
    "rubberband aws": ("rubberband aws setup --dry-run",),
    "rubberband aws setup": (
        "rubberband aws setup --dry-run",
        "rubberband aws setup --region eu-west-1 --types 'g4dn.*,g5.*'",
    ),
    "rubberband aws check": ("rubberband aws check", "rubberband aws check experiment.yaml"),
    "rubberband aws teardown": ("rubberband aws teardown",),
    "rubberband cloud": ("rubberband cloud prices g5.xlarge",),
    "rubberband cloud prices": (
        "rubberband cloud prices",
        "rubberband cloud prices g4dn.xlarge g5.xlarge --region eu-west-1",
    ),
    "rubberband cloud up": ("rubberband cloud up experiment.yaml",),
    "rubberband cloud down": ("rubberband cloud down",),
    "rubberband cloud image": ("rubberband cloud image build experiment.yaml",),
    "rubberband cloud image build": ("rubberband cloud image build experiment.yaml",),
    "rubberband cloud image list": ("rubberband cloud image list",),
    "rubberband cloud image delete": ("rubberband cloud image delete 4f2a91c0",),
    "rubberband cleanup": ("rubberband cleanup", "rubberband cleanup digits"),
}
"""Path of a command -> lines as they are typed. The first one is also the remedy where an argument is missing."""
