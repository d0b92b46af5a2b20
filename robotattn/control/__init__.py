"""From plans to commands: chunk queues, clocks and safety limits. numpy only."""
