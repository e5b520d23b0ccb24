"""Several hosts as network namespaces of one machine, and tests of ddip on them."""
