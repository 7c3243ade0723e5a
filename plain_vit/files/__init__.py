"""Files of weights, safely read and atomically written; nothing here knows whose model they hold."""
