"""Health while training: a monitor, where its numbers go, and triggers that act on them.

May import everything up to `diagnosis`. `monitor` takes samples, `sinks` are where they go, `triggers` say when
(`joined_triggers`: several of them), `schedules` apply a method then, `guard` undoes what did harm. Start reading at
`monitor.Monitor`.
"""
