"""The parts shared by every model: batches, cost model, planner, exchange, pipeline stage and trainer."""
