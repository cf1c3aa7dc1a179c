"""What tests of the command line share."""

# At its first import it binds its log to the stderr that is there. That of a runner is closed with its command, and to
# log later would print a traceback.
import transformers  # noqa: F401
