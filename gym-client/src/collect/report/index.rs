//! The offset of each rollout in the file, ordered by environment server, task and rollout.

use std::collections::HashMap;
use std::io::{BufRead, Read, Seek, SeekFrom};

use gym_core::rollout::metrics::{JsonFields, MetricsError, Rows, Visit, row_key};

use crate::collect::input::rows::{ENVIRONMENT_SERVER, agent_name, parse_row, text_member};

/// The rollouts of one environment server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerRollouts {
    /// Name of the server.
    pub server: String,
    /// The agent named in the first rollout.
    pub agent: Option<String>,
    start: usize,
    end: usize,
}

impl ServerRollouts {
    /// Returns the number of rollouts.
    #[must_use]
    pub fn count(&self) -> usize {
        self.end - self.start
    }
}

/// The location of one row: 32 bytes.
#[derive(Clone, Copy, Debug)]
struct RowLocation {
    task: i64,
    offset: u64,
    rollout: i64,
    length: u32,
    group: u32,
}

/// The index of a rollouts file.
#[derive(Clone, Debug)]
pub struct RolloutsIndex {
    name: String,
    locations: Vec<RowLocation>,
    groups: Vec<ServerRollouts>,
}

impl RolloutsIndex {
    /// Reads the file once. `name` is the file's name in error messages. `server_of_agent` returns the environment
    /// server in front of an agent, for rows without `_ng_environment_server`.
    ///
    /// Rows that name neither a server nor an agent are skipped, as in NeMo Gym. Blank lines are skipped too.
    ///
    /// # Errors
    /// `MetricsError::Row`, with the line, if a row is invalid or its agent is unknown; `MetricsError::Io` if reading fails.
    pub fn scan(
        mut reader: impl BufRead,
        name: impl Into<String>,
        server_of_agent: impl Fn(&str) -> Result<String, String>,
    ) -> Result<Self, MetricsError> {
        let name = name.into();
        let mut locations = Vec::new();
        let mut groups: Vec<ServerRollouts> = Vec::new();
        let mut by_server: HashMap<String, u32> = HashMap::new();
        each_line(&mut reader, &name, |text, line, offset| {
            let fail = |problem: String| MetricsError::Row { place: format!("{name}, line {line}"), problem };
            let row = parse_row(text).map_err(&fail)?;
            let (task, rollout) = row_key(&row, &|| format!("{name}, line {line}"))?;
            let agent = agent_name(&row).map_err(&fail)?;
            let stamp = text_member(&row, ENVIRONMENT_SERVER).map_err(|()| {
                fail(format!("{ENVIRONMENT_SERVER} is not a string; remove it, or set it to the server's name"))
            })?;
            let server = match (stamp, &agent) {
                (Some(stamp), _) => stamp,
                (None, Some(agent)) => server_of_agent(agent).map_err(&fail)?,
                (None, None) => return Ok(()),
            };
            let length = u32::try_from(text.len()).map_err(|_| fail("the row is larger than 4 GiB".to_owned()))?;
            let group = *by_server.entry(server).or_insert_with_key(|server| {
                groups.push(ServerRollouts { server: server.clone(), agent, start: 0, end: 0 });
                groups.len() as u32 - 1
            });
            locations.push(RowLocation { task, offset, rollout, length, group });
            Ok(())
        })?;
        locations.shrink_to_fit();
        // An unstable sort needs no scratch memory of half the index's size; the offset keeps the file's order of rows
        // with equal keys.
        locations.sort_unstable_by_key(|place| (place.group, place.task, place.rollout, place.offset));
        let mut start = 0;
        for rows in locations.chunk_by(|left, right| left.group == right.group) {
            let group = &mut groups[rows[0].group as usize];
            (group.start, group.end) = (start, start + rows.len());
            start = group.end;
        }
        // In the order in which the servers appear in a file sorted by (task, rollout).
        groups.sort_by_key(|group| {
            let first = locations[group.start];
            (first.task, first.rollout, first.offset)
        });
        Ok(Self { name, locations, groups })
    }

    /// Returns the environment servers, in the order of their first rollout.
    #[must_use]
    pub fn groups(&self) -> &[ServerRollouts] {
        &self.groups
    }

    /// Returns the number of indexed rollouts.
    #[must_use]
    pub fn count(&self) -> usize {
        self.locations.len()
    }

    /// Returns the rows of one group, read from `reader`, which must contain the indexed file.
    pub fn rows<'a, R: Read + Seek>(&'a self, group: &ServerRollouts, reader: &'a mut R) -> FileRows<'a, R> {
        let locations = &self.locations[group.start..group.end];
        FileRows { name: &self.name, locations, reader, position: None, text: Vec::new() }
    }
}

/// Calls `each` with the text, the number and the offset of each line that is not blank, until it returns an error.
pub(super) fn each_line(
    mut reader: impl BufRead,
    name: &str,
    mut each: impl FnMut(&str, u64, u64) -> Result<(), MetricsError>,
) -> Result<(), MetricsError> {
    let mut text = Vec::new();
    let (mut next_offset, mut line) = (0_u64, 0_u64);
    loop {
        text.clear();
        let read = reader.read_until(b'\n', &mut text).map_err(|source| io(name, source))?;
        if read == 0 {
            return Ok(());
        }
        line += 1;
        let offset = next_offset;
        next_offset += read as u64;
        let row = text.trim_ascii_end();
        if row.is_empty() {
            continue;
        }
        let row = std::str::from_utf8(row).map_err(|error| MetricsError::Row {
            place: format!("{name}, line {line}"),
            problem: format!("not UTF-8: {error}"),
        })?;
        each(row, line, offset)?;
    }
}

fn io(name: &str, source: std::io::Error) -> MetricsError {
    MetricsError::Io { doing: format!("read {name}: {source}"), source }
}

fn changed(name: &str, offset: u64) -> MetricsError {
    MetricsError::Row {
        place: format!("{name}, byte {offset}"),
        problem: "the file changed while it was read; aggregate again when no program writes to it".to_owned(),
    }
}

/// The rollouts of one group, ordered by (task, rollout); each is read from the file when it is visited.
#[derive(Debug)]
pub struct FileRows<'a, R> {
    name: &'a str,
    locations: &'a [RowLocation],
    reader: &'a mut R,
    /// Offset of the reader after a complete read.
    position: Option<u64>,
    text: Vec<u8>,
}

impl<R: Read + Seek> FileRows<'_, R> {
    /// Returns the text of row `index`.
    ///
    /// # Errors
    /// `MetricsError::Io` if reading fails; `MetricsError::Row` if the file has changed since it was indexed.
    pub fn text(&mut self, index: usize) -> Result<&str, MetricsError> {
        let place = self.locations[index];
        self.text.resize(place.length as usize, 0);
        let moved = match self.position.take() {
            // Relative, so that the next row is read from the buffer.
            Some(position) => self.reader.seek_relative(place.offset.wrapping_sub(position).cast_signed()),
            None => self.reader.seek(SeekFrom::Start(place.offset)).map(drop),
        };
        moved.and_then(|()| self.reader.read_exact(&mut self.text)).map_err(|source| io(self.name, source))?;
        self.position = Some(place.offset + u64::from(place.length));
        std::str::from_utf8(&self.text).map_err(|_| changed(self.name, place.offset))
    }
}

impl<R: Read + Seek> Rows for FileRows<'_, R> {
    fn count(&self) -> usize {
        self.locations.len()
    }

    fn key(&self, index: usize) -> (i64, i64) {
        (self.locations[index].task, self.locations[index].rollout)
    }

    fn visit(&mut self, index: usize, visit: &mut Visit<'_>) -> Result<(), MetricsError> {
        let (name, offset) = (self.name, self.locations[index].offset);
        let row = JsonFields::parse(self.text(index)?).map_err(|_| changed(name, offset))?;
        visit(&row)
    }
}
