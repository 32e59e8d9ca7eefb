// Exercises a broker with MQTT.js: node exercise.js URL VERSION SCENARIO. Ends with status 0 when the scenario held.
'use strict'

const assert = require('node:assert/strict')
const crypto = require('node:crypto')
const mqtt = require('mqtt')

const [url, versionText, scenario] = process.argv.slice(2)
const version = Number(versionText)
const PATIENCE_MS = 20_000
const opened = []

setTimeout(() => {
  console.error(`${scenario} did not end within ${PATIENCE_MS} ms`)
  process.exit(1)
}, PATIENCE_MS).unref()

async function connect (options = {}) {
  const client = await mqtt.connectAsync(url, { protocolVersion: version, reconnectPeriod: 0, ...options })
  opened.push(client)
  client.inbox = []
  client.on('message', (topic, payload, packet) => client.inbox.push({ topic, payload, packet }))
  return client
}

// The next `count` messages, in the order of their arrival.
async function take (client, count) {
  while (client.inbox.length < count) {
    await new Promise(resolve => client.once('message', resolve))
  }
  return client.inbox.splice(0, count)
}

function persistent (clientId) {
  const properties = version === 5 ? { sessionExpiryInterval: 1000 } : undefined
  return { clientId, clean: false, properties }
}

const scenarios = {
  async everyQos () {
    const client = await connect()
    for (const qos of [0, 1, 2]) {
      const topic = `js/qos/${qos}`
      const [granted] = await client.subscribeAsync(topic, { qos })
      assert.equal(granted.qos, qos)
      const sent = Array.from({ length: 300 }, (_, number) => String(number))
      await Promise.all(sent.map(text => client.publishAsync(topic, text, { qos })))
      const received = await take(client, sent.length)
      assert.deepEqual(received.map(({ payload }) => payload.toString()), sent)
      assert(received.every(({ packet }) => packet.qos === qos && !packet.retain))
    }
  },

  // Larger than any one frame, read or buffer on the way, in both directions.
  async largePayload () {
    const client = await connect()
    await client.subscribeAsync('js/large', { qos: 2 })
    for (const size of [125, 126, 65_535, 65_536, 5_000_000]) {
      const sent = crypto.randomBytes(size)
      await client.publishAsync('js/large', sent, { qos: 2 })
      const [{ payload }] = await take(client, 1)
      assert(sent.equals(payload), `${size} bytes came back differently`)
    }
  },

  async retained () {
    const topic = `js/kept/${version}/${new URL(url).protocol}`
    const publisher = await connect()
    await publisher.publishAsync(topic, 'kept', { qos: 1, retain: true })
    const subscriber = await connect()
    await subscriber.subscribeAsync(topic, { qos: 1 })
    const [{ payload, packet }] = await take(subscriber, 1)
    assert.equal(payload.toString(), 'kept')
    assert(packet.retain)
    await publisher.publishAsync(topic, '', { qos: 1, retain: true })
    assert.equal((await take(subscriber, 1))[0].payload.length, 0)
  },

  async will () {
    const topic = `js/wills/${version}/${new URL(url).protocol}`
    const witness = await connect()
    await witness.subscribeAsync(topic, { qos: 1 })
    const vanishing = await connect({ will: { topic, payload: Buffer.from('gone'), qos: 1, retain: false } })
    vanishing.on('error', () => {})
    vanishing.stream.destroy()
    const [{ payload }] = await take(witness, 1)
    assert.equal(payload.toString(), 'gone')
  },

  async session () {
    const name = `js-sleeper-${version}-${new URL(url).protocol}`
    const topic = `js/queue/${name}`
    const before = await connect(persistent(name))
    await before.subscribeAsync(topic, { qos: 2 })
    await before.endAsync()
    const publisher = await connect()
    for (let number = 0; number < 40; number++) {
      await publisher.publishAsync(topic, String(number), { qos: 1 + number % 2 })
    }
    // Messages come right behind CONNACK, so the listener must be there before it.
    const after = mqtt.connect(url, { protocolVersion: version, reconnectPeriod: 0, ...persistent(name) })
    opened.push(after)
    after.inbox = []
    after.on('message', (_, payload, packet) => after.inbox.push({ payload, packet }))
    const connack = await new Promise((resolve, reject) => after.once('connect', resolve).once('error', reject))
    assert(connack.sessionPresent)
    const received = await take(after, 40)
    for (const qos of [1, 2]) {
      const numbers = received.filter(({ packet }) => packet.qos === qos).map(({ payload }) => Number(payload))
      assert.deepEqual(numbers, Array.from({ length: 20 }, (_, index) => index * 2 + qos - 1))
    }
  },

  async properties () {
    assert.equal(version, 5)
    const requester = await connect()
    const responder = await connect()
    await responder.subscribeAsync('js/service', { qos: 1, properties: { subscriptionIdentifier: 9 } })
    await requester.subscribeAsync('js/answers', { qos: 1 })
    const sent = {
      responseTopic: 'js/answers',
      correlationData: Buffer.from([0, 255]),
      contentType: 'text/plain',
      userProperties: { unit: '°C', place: ['attic', 'roof'] }
    }
    await requester.publishAsync('js/service', 'question', { qos: 1, properties: sent })
    const [{ packet }] = await take(responder, 1)
    const got = packet.properties
    assert.equal(got.subscriptionIdentifier, 9)
    assert.equal(got.contentType, 'text/plain')
    assert.deepEqual(JSON.parse(JSON.stringify(got.userProperties)), sent.userProperties)
    await responder.publishAsync(got.responseTopic, 'answer', { qos: 1, properties: { correlationData: got.correlationData } })
    const [answer] = await take(requester, 1)
    assert.equal(answer.payload.toString(), 'answer')
    assert(sent.correlationData.equals(answer.packet.properties.correlationData))
  }
}

async function main () {
  await scenarios[scenario]()
  await Promise.all(opened.filter(client => client.connected).map(client => client.endAsync()))
}

main().then(() => process.exit(0), error => {
  console.error(error)
  process.exit(1)
})
