"""The whole program: the commands of the engine, and the stages of training.

It stands in the topmost layer, because the engine's own command line may not import training.
"""

from specdec.cli.app import app, main
from specdec.cli.options import SeveralValues
from specdec.train_eagle.evaluate import evaluate
from specdec.train_eagle.export import export
from specdec.train_eagle.prepare import prepare
from specdec.train_eagle.regenerate import regenerate
from specdec.train_eagle.train import train

__all__ = ["app", "main"]

# In the order in which they run.
STAGES = (regenerate, prepare, train, evaluate, export)
for stage in STAGES:
    app.command(cls=SeveralValues)(stage)
