"""What every engine must do, as checks that the tests run and that `ownloop check-engine` runs on any engine."""
