"""Health while training: a monitor, where its numbers go, and triggers that act on them.

May import `diagnosis`. Start reading at `monitor.Monitor`.
"""
