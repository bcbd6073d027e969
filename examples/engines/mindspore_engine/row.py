"""The engine's row of the table of engines, which an entry point names. Imports no framework."""

from trainer.engine_table import EngineEntry

ROW = EngineEntry(
    engine="examples.engines.mindspore_engine.engine:MindSporeEngine",
    layout_check="examples.engines.mindspore_engine.layout_check:check_layout",
)
